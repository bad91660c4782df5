"""Prompts of the reference trainer: files, epochs and lengths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("datasets")


from grpo_kernels.training.data import encode, load_rows, prompts_of_step
from grpo_kernels.training.trainer import TrainConfig, Trainer
from support.runs import PROMPTS, config, evens, gsm8k, tiny


@pytest.mark.parametrize("configuration", ["main", None])
def test_data_laid_out_as_gsm8k(tok: Any, tmp_path: Path, configuration: str | None) -> None:
    folder = str(gsm8k(tmp_path / "gsm8k"))
    c = TrainConfig(dataset=folder, dataset_config=configuration, prompt_template="Q: {prompt}")
    train, held_out = load_rows(c)
    assert (len(train), len(held_out)) == (12, 4)
    assert encode(train, tok, c)[3]["prompt"] == "Q: 3+1=" and train[3]["answer"] == "4" and train[3]["question"] == "3+1="


@pytest.mark.parametrize("name", ["p.jsonl", "p.parquet"])
def test_data_in_one_file_holds_out_its_end(tmp_path: Path, name: str) -> None:
    import datasets

    data = datasets.Dataset.from_list(PROMPTS)
    data.to_parquet(str(tmp_path / name)) if name.endswith("parquet") else data.to_json(str(tmp_path / name))
    train, held_out = load_rows(TrainConfig(dataset=str(tmp_path / name), eval_prompts=5))
    assert [r["prompt"] for r in train + held_out] == [r["prompt"] for r in PROMPTS] and len(held_out) == 5
    with pytest.raises(ValueError, match="eval_prompts=24"):
        load_rows(TrainConfig(dataset=str(tmp_path / name), eval_prompts=24))
    with pytest.raises(ValueError, match=r"prompt_column='text'.*prompt, answer"):
        load_rows(TrainConfig(dataset=str(tmp_path / name), eval_prompts=5, prompt_column="text"))


def test_every_epoch_visits_every_prompt_once() -> None:
    rows = [{"prompt": str(i)} for i in range(10)]
    visited = [row["prompt"] for step in range(5) for row in prompts_of_step(rows, step, 4, seed=1)]
    assert len(set(visited[:10])) == len(set(visited[10:])) == 10
    assert visited[:10] != visited[10:] != [row["prompt"] for row in rows]


def test_long_prompts_are_left_out_with_a_count(tok: Any, tmp_path: Path, capsys: Any) -> None:
    rows = [{"prompt": "1+2=", "answer": "3"}, {"prompt": "1+2+3+4=", "answer": "10"}]
    t = Trainer(config(tmp_path, max_prompt_tokens=5), model=tiny(tok), tokenizer=tok, rows=(rows, rows), rewards=[evens])
    assert [r["prompt"] for r in t.train_rows] == ["1+2="] and "left out 1 of 2" in capsys.readouterr().out
