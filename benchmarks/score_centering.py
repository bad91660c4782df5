"""What score centering does to the gradient of a batch and to runs whose sampler has rounded weights.

    python -m benchmarks.score_centering [--seeds 0 1 2 3] [--write]

The reference trainer on the problems of examples/arithmetic.py, of numbers up to 9. Its completions come from a copy of the policy
whose matrices are rounded to 8, 4 or 3 bits, each row to a scale of its own, before each step. --write: the result in
benchmarks/results/score_centering.json as soon as it is known, so that an interrupted command goes on, and the picture
docs/score_centering.svg."""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from benchmarks import plots, results
from benchmarks.machine import machine
from benchmarks.results import RESULTS, ROOT
from examples import arithmetic
from grpo_kernels import Cispo, TokenSets
from grpo_kernels.formulas.centering import ScoreCentering
from grpo_kernels.formulas.surrogates import PolicyGradient
from grpo_kernels.training.config import TrainConfig
from grpo_kernels.training.data import prompts_of_step
from grpo_kernels.training.ranks import ParallelModel
from grpo_kernels.training.rewards import exact
from grpo_kernels.training.rollouts import completion_logits
from grpo_kernels.training.trainer import Trainer

SETTINGS: dict[str, Any] = {
    "preset": "reinforce", "steps": 150, "prompts_per_step": 16, "group_size": 8, "max_new_tokens": 4, "lr": 2e-4, "warmup_steps": 5,
}  # fmt: skip
WIDTH, LAYERS, WARM_UP, HELD_OUT = 64, 2, 300, 100
#: Ids that the sampler records, the cap of truncated weights, batches of a policy that stands still.
HEAD, CAP, BATCHES = 8, 2.0, 24
SURROGATES = {"policy gradient": PolicyGradient(), "truncated weights": Cispo(CAP)}
ARMS = {
    f"{name}{', centered' * centers}": (surrogate, centers)
    for name, surrogate in SURROGATES.items()
    for centers in (False, True)
}
#: Bits of the sampler's weights; 0: not rounded.
SAMPLERS = (8, 4, 3)
FILE = RESULTS / "score_centering.json"


def rounded_(model: Any, bits: int) -> None:
    """Rounds each row of each matrix to `bits` with a scale of its own, in place."""
    for p in model.parameters():
        if p.dim() == 2 and bits:
            scale = p.abs().amax(1, keepdim=True).clamp(min=1e-12) / (2 ** (bits - 1) - 1)
            p.data = (p / scale).round() * scale


class Run(Trainer):
    """A trainer with a sampler of its own."""

    bits: int
    sampler: Any
    gradient: torch.Tensor | None = None

    def begin(self, bits: int, arm: str) -> None:
        self.bits, self.sampler = bits, copy.deepcopy(self.model)
        self.rollouts.policy = ParallelModel(self.sampler, self.ranks, "single", frozen=True)
        loss = self.losses.loss

        def with_head(model: Any, completions: Any, batch: Any, objective: Any, *rest: Any) -> Any:
            top = self.log_q(completions).topk(HEAD)
            sets = TokenSets.from_padded(top.indices.flatten(0, 1), values=top.values.flatten(0, 1))
            return loss(model, completions, replace(batch, logp_terms=sets if objective.listed else None), objective, *rest)

        self.losses.loss = with_head  # type: ignore[method-assign]
        self.take(arm)
        self.refresh()

    def take(self, arm: str) -> None:
        surrogate, centers = ARMS[arm]
        self.objective = replace(self.objective, surrogate=surrogate, listed=ScoreCentering(surrogate) if centers else None)

    def refresh(self) -> None:
        self.sampler.load_state_dict(self.model.state_dict())
        rounded_(self.sampler, self.bits)

    @torch.no_grad()
    def log_q(self, completions: Any) -> torch.Tensor:
        return completion_logits(self.sampler, completions).log_softmax(-1)

    def train_step(self) -> dict[str, float]:
        self.refresh()
        return super().train_step()

    def taken(self) -> torch.Tensor:
        """The gradient, which is 0 afterwards."""
        found = torch.cat([p.grad.flatten() for p in self.model.parameters()]).double()
        self.optimizer.zero_grad()
        return found


class Still(Run):
    """Its updates keep the gradient and leave the policy as it is."""

    def move(self, lr: float) -> dict[str, float]:
        self.gradient = self.taken()
        return {}


@contextmanager
def trainer(start: tuple[Any, list[Any], list[Any]], tok: Any, kind: Any, bits: int, arm: str, seed: int) -> Any:
    model, *rows = start
    with tempfile.TemporaryDirectory() as folder:
        config = TrainConfig(
            out=folder,
            progress=False,
            device="cpu",
            eval_steps=0,
            eval_prompts=1,
            checkpoint_steps=0,
            ratio_to="sampler",
            seed=seed,
            **SETTINGS,
        )
        run = kind(config, model=copy.deepcopy(model), tokenizer=tok, rows=tuple(rows), rewards=[exact])
        run.begin(bits, arm)
        yield run


def warmed_up(seed: int, tok: Any) -> tuple[Any, list[Any], list[Any]]:
    rows = [row for part in arithmetic.problems(20_000, seed) for row in part]
    rows = [row for row in rows if all(abs(int(term)) <= 9 for term in row["sum"].split())]
    torch.manual_seed(seed)
    model = arithmetic.policy(WIDTH, LAYERS)
    arithmetic.warm_up(model, tok, rows[HELD_OUT:], seed, WARM_UP, progress=False)
    return model, rows[HELD_OUT:], rows[:HELD_OUT]


# ---- a policy that stands still


def coefficients(p: torch.Tensor, q: torch.Tensor, arm: str) -> torch.Tensor:
    """[.., V]: what log p of each id is multiplied by in the mean over the sampler's tokens, for a reward of 1."""
    surrogate, centers = ARMS[arm]
    log_p, log_q, one = p.log(), q.log(), torch.ones_like(p)
    found = q * -surrogate(log_p, log_q, one)[1]
    if centers:
        ids = q.topk(HEAD).indices
        sums: Callable[[torch.Tensor], torch.Tensor] = lambda x: x.sum(-1, keepdim=True)  # noqa: E731
        slopes = ScoreCentering(surrogate)(log_p.gather(-1, ids), log_q.gather(-1, ids), one[..., :1], sums)[1]
        found = found.scatter_add(-1, ids, -slopes)
    return found


def moments(vectors: list[torch.Tensor]) -> tuple[float, float]:
    """(squared length of the mean, unbiased; sum of the variances)"""
    x = torch.stack(vectors)
    variance = float(x.var(0).sum())
    return float(x.mean(0).square().sum()) - variance / len(x), variance


def still(start: Any, tok: Any, policy: Any, bits: int, seed: int) -> dict[str, Any]:
    """Of BATCHES batches, each arm on the same completions: gradients and drift terms."""
    found: dict[str, dict[str, list[torch.Tensor]]] = {arm: {"gradient": [], "drift": []} for arm in ARMS}
    kl, rewards = [], []
    with trainer(start, tok, Still, bits, "policy gradient", seed) as run:
        run.model.load_state_dict(policy)
        run.refresh()
        for number in range(BATCHES):
            rows = prompts_of_step(run.train_rows, number, SETTINGS["prompts_per_step"], seed)
            generator = torch.Generator().manual_seed(1_000_003 * (seed + 1) - number - 1)
            completions = run.rollouts.sample(rows, SETTINGS["group_size"], generator)
            scores = run.rollouts.score(rows, completions, SETTINGS["group_size"])
            advantages = run.advantages(rows, completions, scores)
            log_q, reward = run.log_q(completions)[completions.mask], float(scores.totals.mean())
            for arm, of in found.items():
                run.take(arm)
                run.update(completions, advantages)
                of["gradient"].append(run.gradient)
                log_p = completion_logits(run.model, completions)[completions.mask].log_softmax(-1)
                (-reward * (coefficients(log_p.detach().exp(), log_q.exp(), arm) * log_p).sum(-1).mean()).backward()
                of["drift"].append(run.taken())
            kl.append(float((log_q.exp() * (log_q - log_p.detach())).sum(-1).mean()))
            rewards.append(reward)
    of_arms = {arm: {name: moments(vectors) for name, vectors in of.items()} for arm, of in found.items()}
    return {"kl": statistics.mean(kl), "reward": statistics.mean(rewards), "arms": of_arms}


# ---- runs


def trained(start: Any, tok: Any, bits: int, arm: str, baseline: bool, seed: int) -> tuple[dict[str, Any], Any]:
    with trainer(start, tok, Run, bits, arm, seed) as run:
        if not baseline:
            run.advantages = lambda rows, completions, scores: scores.totals.float()  # type: ignore[method-assign]
        reward = [run.train_step()["reward"] for _ in range(SETTINGS["steps"])]
        return {"reward": reward, "accuracy": arithmetic.accuracy(run.model, tok, start[2])}, run.model.state_dict()


def measure(seed: int, runs: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """What is not among these runs yet."""
    tok = arithmetic.tokenizer()
    start = warmed_up(seed, tok)
    policies = {"before": start[0].state_dict()}
    for baseline, samplers in ((True, SAMPLERS), (False, SAMPLERS[:2])):
        for bits, arm in [(0, "policy gradient"), *((bits, arm) for bits in samplers for arm in ARMS)]:
            one = {"part": "run", "seed": seed, "bits": bits, "arm": arm, "baseline": baseline}
            if not any(one.items() <= run.items() for run in runs):
                found, policy = trained(start, tok, bits, arm, baseline, seed)
                yield one | found
                policies |= {"after": policy} if baseline and not bits else {}
    for bits in SAMPLERS:
        for when in ("before", "after"):
            one = {"part": "still", "seed": seed, "bits": bits, "when": when}
            if not any(one.items() <= run.items() for run in runs):
                if when not in policies:
                    policies[when] = trained(start, tok, 0, "policy gradient", True, seed)[1]
                yield one | still(start, tok, policies[when], bits, seed)


def short(x: Any) -> Any:
    """Numbers to four digits."""
    if isinstance(x, dict):
        return {name: short(part) for name, part in x.items()}
    if isinstance(x, list | tuple):
        return [short(part) for part in x]
    return float(f"{x:.4g}") if isinstance(x, float) else x


def picture(record: dict[str, Any]) -> dict[str, Any]:
    """Rewards over the steps, means over the seeds and over eight steps."""
    panels = []
    for bits, baseline in (*((bits, True) for bits in SAMPLERS), (4, False)):
        curves = {}
        for arm, of in {"weights not rounded": (0, "policy gradient"), **{arm: (bits, arm) for arm in ARMS}}.items():
            known = [run for run in record["runs"] if run.get("baseline") is baseline]
            runs = [run["reward"] for run in known if (run["bits"], run["arm"]) == of]
            middle = [statistics.mean(x) for x in zip(*runs, strict=True)]
            at = range(16, len(middle) + 1, 16)
            curves[arm] = [[*at], short([statistics.mean(middle[i - 8 : i]) for i in at])]
        title = f"reward, sampler of {bits} bits{', advantages are rewards' * (not baseline)}"
        panels.append({"title": title, "x": "step", "log": "", "curves": curves})
    return {"title": "Score centering in training", "panels": panels, "notes": []}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3])
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    record = {
        "command": f"python -m benchmarks.score_centering --seeds {' '.join(map(str, args.seeds))} --write", "date": time.strftime("%Y-%m-%d"),
        "machine": machine("cpu"), "load": os.getloadavg()[0], "settings": {**SETTINGS, "head": HEAD, "cap": CAP, "batches": BATCHES},
    }  # fmt: skip
    record["runs"] = results.load(FILE).get("runs", [])
    for seed in args.seeds:
        for one in measure(seed, record["runs"]):
            record["runs"].append(short(one))
            print(
                {name: x for name, x in one.items() if name != "arms"}
                | {"reward": one["reward"] if one["part"] == "still" else statistics.mean(one["reward"][-20:])},
                flush=True,
            )
            if args.write:
                results.save(FILE, record)
    if args.write:
        plots.save(picture(record), ROOT / "docs" / "score_centering.svg")


if __name__ == "__main__":
    main()
