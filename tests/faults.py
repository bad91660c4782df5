"""Small faults, each of which some test must find: the proof that the tests have power.

    python tests/faults.py [PART OF A NAME OR FILE ...] [--all]

copies the project, puts in one fault after the other, builds what is compiled where that is the faulty part, and runs the tests
that are named beside it, or with --all the whole quick suite. It ends with the faults that no test found. `test_faults.py` sees
to it that every fault still fits the code."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]


class Fault(NamedTuple):
    what: str
    file: str
    old: str  # occurs once in the file
    new: str
    tests: str  # that find it


def of(file: str, tests: str, *faults: tuple[str, ...]) -> list[Fault]:
    """The faults of a file: (what, old, new), and the tests that find it where they are others than `tests`."""
    return [Fault(what, file, old, new, *(own or (tests,))) for what, old, new, *own in faults]


COMBINATIONS = "tests/core/test_combinations.py"
OBJECTIVES = "tests/core/test_objectives.py"
RELATIONS = "tests/core/test_relations.py"
AUTOGRAD = "tests/core/test_autograd.py"
COST = "tests/core/test_cost.py"
PRODUCTS = "tests/core/test_products.py"
SETS = "tests/core/test_sets_and_teachers.py"
METRICS = "tests/core/test_metrics.py"
SPARSE = "tests/core/test_sparse_gradients.py"
MEMORY = "tests/core/test_weight_memory.py"
HOSTILE = "tests/rows/test_sanitizers.py"
COMPILED = "tests/rows/test_triton_compiled.py"

# fmt: off
FAULTS: list[Fault] = [
    *of("grpo_kernels/rows/partials.py", COMBINATIONS,
        ("the shift of a part's weighted sum is dropped", '(parts["weighted"] + parts["sum"] * shift)', 'parts["weighted"]'),
        ("squares are shared once", 'share * share * parts["squares"]', 'share * parts["squares"]'),
        (
            "ids of a part are not moved to its place", "ids + starts, last", "ids, last",
            "tests/rows/test_vocab_parallel.py",
        ),
        ("a sign in the slope of the softcap", "(1.0 - torch.tanh(x * (self.scale", "(1.0 + torch.tanh(x * (self.scale"),
        ("half the slope of the sum of squares", 'slopes["prob"] = 2.0 * given', 'slopes["prob"] = 1.0 * given'),
        (
            "what arrives at masked rows is used", 'return x if read is None else torch.where(read, x, 0.0)\n\n        given',
            'return x\n\n        given',
        ),
        ("masked rows keep a top_prob", 'if "top_prob" in values and read is not None:', "if False:", SETS),
    ),
    *of("grpo_kernels/rows/divergence.py", COMBINATIONS,
        ("a wrong coefficient of psi", "1 / 24, 1 / 120", "1 / 24, 1 / 210", SETS),
        ("a wrong coefficient of phi", "squared * (1 / 5 +", "squared * (1 / 7 +", SETS),
        ("the sign of the distance of two rows", "(z - w) - apart", "(z - w) + apart"),
        ("the mixture's shares are those of the other stream", "-log_ratio, 1.0 - mixture)", "-log_ratio, mixture)"),
        ("the share of the student is that of the teacher", "p = (1.0 - mixture) * p", "p = mixture * p"),
        ("a sign in the sums of parts", "(g - f) + f * apart", "(g - f) - f * apart"),
    ),
    *of("grpo_kernels/rows/stream.py", COMBINATIONS,
        ("the sign of what other columns get", "others = -total  #", "others = total  #"),
        (
            "blocks of rows begin again in each sequence", "yield a * T + t, a * T + end, self.logits",
            "yield t, end, self.logits",
        ),
        ("the gradient at ids lacks the transform", "g * transform.slope(self.logits, rows), 0.0)", "g, 0.0)"),
        ("1 - p of a certain id is rounded", "rest = torch.where(p > 0.5, (mass", "rest = torch.where(p > 1.5, (mass", SETS),
        ("the version of overwritten logits stays", "torch.autograd.graph.increment_version(self.logits)", "pass", AUTOGRAD),
        (
            "the factor misses rows of sets",
            'if factor is not None and values is not None:\n            values = values * factor',
            'if factor is not None and values is not None:\n            pass',
        ),
        (
            "hidden states that changed are not noticed", "return None if x is None or x.is_inference() else x._version",
            "return None", MEMORY,
        ),
        (
            "a placeholder is added to shared memory", "return zeros(weight.shape, weight.dtype, weight.device)",
            "return torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)", MEMORY,
        ),
        (
            "16-bit memory takes the sum of chunks", "self.total if self.total.dtype == torch.float32 else None", "self.total",
            MEMORY,
        ),
        (
            "divergences lack their teacher's weight", "torch.where(weight == 0, 0.0, weight * x)",
            "torch.where(weight == 0, 0.0, x)",
        ),
        (
            "every teacher adds the nll term", "backend.fused(own, TokenStage.divergence_alone(own.targets, of_part), memory)",
            "backend.fused(own, stage if here is None else stage.at(here), memory)",
        ),
    ),
    *of("grpo_kernels/rows/sets.py", COMBINATIONS,
        ("no room for a target beside a full set", "-(-(sets.longest + 1) // 16) * 16", "-(-sets.longest // 16) * 16"),
        ("rows are grouped by ids, not by slots", "exceeded(sets.counts + 1).argsort", "exceeded(sets.counts).argsort", SETS),
        (
            "a target of another rank is this rank's",
            "return torch.where(self._own[slots.offsets[:-1] + target], target, -1)", "return target",
        ),
        ("the gradient over a set lacks the transform", "gradient * transform.slope(logits, self.kept.slots.rows)", "gradient"),
        (
            "sums of a mixture are those of one rank", "mixed if self.shard is None else self.shard.sum_over_ranks(mixed)",
            "mixed",
        ),
        (
            "the teacher's rows are those of the whole vocabulary",
            'result, gradient = kernels.fused(z, stage, wanted, self._beside(kernels, self.one))',
            'result, gradient = kernels.fused(z, stage, wanted, None)',
        ),
    ),
    *of("grpo_kernels/rows/hidden.py", COMBINATIONS,
        (
            "the two halves of a product are swapped", "logits, of_second = self.products.logits(both)",
            "of_second, logits = self.products.logits(both)",
        ),
        ("the bias's gradient is that of the last chunk", "self.d_bias += ", "self.d_bias = ", RELATIONS),
        (
            "columns are drawn under another row's number", "draws.take(places, self",
            "draws.take(torch.arange(len(places)), self", SPARSE,
        ),
        (
            "the heads of several teachers are the first one's",
            'if id(stream) not in self._made:\n            self._made[id(stream)] = _products(stream)\n        own = self._made[id(stream)]',
            'if not self._made:\n            self._made[0] = _products(stream)\n        own = self._made[0]', COST,
        ),
        ("first_row is not counted", "starts(sparse.seed, places + sparse.first_row)", "starts(sparse.seed, places)", SPARSE),
        (
            "targets of a shard are not moved", "own = whole.targets if shard is None else whole.targets - shard.start",
            "own = whole.targets", "tests/rows/test_vocab_parallel.py",
        ),
        ("rows whose slopes cancel are left out", "nonzero = nonzero.index_fill(0, slots.rows[at_ids != 0], True)", "pass"),
        ("the bias gets nothing from sets", "self.backend.add_hidden_rows(values, slots, ones, self.d_bias[:, None])", "pass"),
        ("rows without a gradient have no log-probs", "index[active:], False)", "index[:0], False)", COST),
        (
            "what arrives at a gradient made ahead is dropped", "self.d_hidden.addcmul_(slopes.target[:, None], found.ahead)",
            "self.d_hidden.add_(found.ahead)",
        ),
        (
            "a gradient made ahead is made again beside that of the entropy", 'slopes.with_("target", torch.zeros_like(slopes.target))',
            "slopes",
        ),
        ("a gradient is made ahead for rows that can have none", "whole.active if whole.ahead else None", "None", PRODUCTS),
        ("a bias of its own is not looked at", " and _same(self.bias, other.bias)", ""),
    ),
    *of("grpo_kernels/rows/products.py", "tests/rows/test_blocks.py",
        ("earlier blocks leave nothing", "before = own if several else 0", "before = 0"),
        (
            "the gradient of a chunk starts one row late", "logits.view(torch.bfloat16)[:, : logits.shape[1]]",
            "logits.view(torch.bfloat16)[:, logits.shape[1] :]", COMBINATIONS,
        ),
        (
            "the sum of the chunks before is dropped", "cpu_products.d_weight(d_logits, hidden, total, out)",
            "cpu_products.d_weight(d_logits, hidden, None, out)", RELATIONS,
        ),
        (
            "the sum is rounded with every chunk", "dtype = self._gradient_dtype if last else torch.float32",
            "dtype = self._gradient_dtype", COST,
        ),
    ),
    *of("grpo_kernels/rows/memory.py", "tests/rows/test_memory.py",
        ("memory is given out twice", "if block.lease() is None and size", "if size"),
        ("zeros are not written", "return empty(shape, dtype, device).zero_()", "return empty(shape, dtype, device)", MEMORY),
    ),
    *of("grpo_kernels/rows/selection.py", SPARSE,
        ("the generator shifts by another number", "_shifted(x, 27)", "_shifted(x, 26)"),
        ("the target counts with the step", "torch.where(is_target, p, p.clamp(min=step))", "p.clamp(min=step)"),
        ("logits stay when rows are sorted", "ids, logits = ids[order], logits[order]", "ids = ids[order]"),
    ),
    *of("grpo_kernels/rows/ragged.py", COMBINATIONS,
        ("an id belongs to two ranks", "self.ids < first + count", "self.ids <= first + count"),
        ("slots of other chunks are in use", "ids=torch.where(place >= 0, self.ids, -1)", "ids=self.ids", RELATIONS),
        (
            "values are not sorted with their slots", "torch.cat([values, of_others])[order]",
            "torch.cat([values, of_others])", SPARSE,
        ),
    ),
    *of("grpo_kernels/rows/parallel.py", "tests/rows/test_vocab_parallel.py",
        ("a rank counts its own mass twice", "everyone[:, -1:] < start", "everyone[:, -1:] <= start"),
        ("the gradient of padding is left as it was", "padding[at // out.shape[1], at % out.shape[1]] = 0", "pass"),
        (
            "ids of a rank count from 0", "torch.full((1, partials.shape[1]), start, dtype",
            "torch.full((1, partials.shape[1]), 0, dtype",
        ),
        (
            "hidden states are summed whatever is asked", "self.sum_over_ranks(d_hidden) if self.reduce_hidden else d_hidden",
            "self.sum_over_ranks(d_hidden)", COMBINATIONS,
        ),
        (
            "a rank without columns has every target", '"target": torch.nan, "teacher_max"', '"target": 0.0, "teacher_max"',
            COMBINATIONS,
        ),
    ),
    *of("grpo_kernels/rows/run.py", SETS,
        ("a teacher that was written to is not noticed", "if problem.versions() != ctx.versions:", "if False:"),
        (
            "passes are summed in 16 bits", "twice = len(wholes) > 1 or any(x.ahead or (sets and x.all_rows) for x in wholes)",
            "twice = any(x.ahead for x in wholes)", MEMORY,
        ),
        ("the factor of the loss is dropped", "ctx.backend.scale_(gradient, d_loss)", "pass", COMBINATIONS),
        (
            "a gradient is handed over twice", "gradients, ctx.gradients = list(ctx.gradients), None",
            "gradients = list(ctx.gradients)", AUTOGRAD,
        ),
    ),
    *of("grpo_kernels/losses.py", SETS,
        (
            "fp16 gradients are stored before the loss scale",
            "(stream.logits.dtype == torch.float16 and torch.is_grad_enabled())", "False", AUTOGRAD,
        ),
        (
            "a NaN among nll_weights is not looked for", ', "weights", "nll_weight"):', ', "weights"):',
            "tests/core/test_refusals.py",
        ),
        (
            "a reference over the vocabulary runs over the sets",
            'of_sets = kept if options.reference_over == "kept" else None', "of_sets = kept",
        ),
        (
            "token_weights are dropped", 'rows = rows.weighted(per_token("token_weights"', '(per_token("token_weights"',
            "tests/core/test_objective.py",
        ),
        ("ess without weights", "else ratio * rows.weights", "else ratio", METRICS),
        ("masked tokens count as zero advantages", "(trained & (rows.advantages == 0))", "(rows.advantages == 0)", METRICS),
        ("rows without a set are in kept_mass", "has = read & (sets.counts > 0)", "has = read"),
        (
            "the KL metric is over the sets",
            "of_kl = self.whole_logps.reshape(-1) if self.kl_apart and self.whole_logps is not None else logps",
            "of_kl = logps",
        ),
        (
            "active rows do not come first", "torch.cat([first, others.nonzero()[:, 0]])",
            "torch.cat([others.nonzero()[:, 0], first])", COST,
        ),
    ),
    *of("grpo_kernels/streams.py", SETS,
        (
            "a reference has the policy's transform",
            "policy.transform if head.transform is None else as_transform(head.transform)", "policy.transform",
        ),
        (
            "a teacher's own transform is dropped", "ref_logits, transform = ref_logits[0], as_transform(ref_logits[1])",
            "ref_logits = ref_logits[0]", COMBINATIONS,
        ),
    ),
    *of("grpo_kernels/logprobs.py", COMBINATIONS,
        ("missing is not applied to the mask", "mask = narrowed(kept, targets, mask, options.missing)", "pass"),
        ("a detached entropy has a gradient", '(name != "entropy" or entropy is True)', "True"),
        ("the mass of no sets", 'named["log_kept_mass"] = torch.zeros_like', 'named["log_kept_mass"] = torch.ones_like'),
    ),
    *of("grpo_kernels/divergences.py", COMBINATIONS,
        (
            "the temperature's square divides", "value = value / squared(stream.transform, read)",
            "value = value * squared(stream.transform, read)",
        ),
    ),
    *of("grpo_kernels/streams.py", COMBINATIONS,
        (
            "masked weights of teachers are read",
            "weights if policy.mask is None else torch.where(policy.mask.reshape(-1), weights, 0.0)", "weights",
        ),
        (
            "temperatures of masked rows are squared", "inverse = torch.where(read, inverse, 1.0)", "pass",
            "tests/core/test_refusals.py",
        ),
    ),
    *of("grpo_kernels/batch.py", "tests/core/test_batch.py",
        (
            "masked numbers are used",
            "return torch.where(self.mask, as_wide(name, value, self.targets.shape, self.cu_seqlens), 0.0).reshape(-1)",
            "return per_token(name, value, self.targets.shape, self.cu_seqlens)", OBJECTIVES,
        ),
        (
            "rows with an nll weight alone have no gradient", "contributing = contributing | (nll_weights != 0)", "pass",
            COMBINATIONS,
        ),
        (
            "one advantage a sequence is read as one a token", "advantages = advantages[:, None]", "pass",
            "tests/rewards/test_advantages.py",
        ),
        ("outside_set counts masked tokens", "(lacking & given).sum()", "lacking.sum()", SETS),
        ("a moved batch forgets the mask that it was given", 'self.__dict__.get("_given_mask", self.mask)', "self.mask"),
        (
            "an exchange of ranks is not made again",
            'if known is None or known[0] != versions:\n            known = versions, own',
            'if known is None:\n            known = versions, own', "tests/core/test_context_parallel.py",
        ),
        ("a segment's last token predicts the next segment", "valid[..., 1:] & follows", "valid[..., 1:]"),
        (
            "sets cross segments", "torch.where(follows, source, -1).flatten()", "source.flatten()",
            "tests/core/test_token_sets.py",
        ),
    ),
    *of("grpo_kernels/token_sets.py", "tests/core/test_token_sets.py",
        ("offsets of joined sets start again", "offsets.append(part.offsets[1:] + base)", "offsets.append(part.offsets[1:])"),
        (
            "an id of the vocabulary's size passes", "if sets.largest_id < vocab:", "if sets.largest_id <= vocab:",
            "tests/core/test_refusals.py",
        ),
        (
            "a missing target stays in its set", 'return empty | outside(sets, targets) if missing == "full" else empty',
            "return empty", COMBINATIONS,
        ),
    ),
    *of("grpo_kernels/token_set_rules.py", "tests/core/test_token_sets.py",
        ("top-p drops the id that crosses it", "(mass.cumsum(-1) - mass < needed)", "(mass.cumsum(-1) < needed)"),
        ("of equal ids one too few", "equal.cumsum(-1) <= room", "equal.cumsum(-1) < room"),
        ("the order of SGLang's rules", "[[*k], [*p], [*m]] if m", "[[*m], [*p], [*k]] if m"),
    ),
    *of("grpo_kernels/token_set_formats.py", "tests/core/test_token_sets.py",
        (
            "records go one row late", "own[place] = () if record is None else record",
            "own[place - 1] = () if record is None else record",
        ),
        ("a negative row is counted from the front", "torch.where(numbers < 0, numbers + count, numbers)", "numbers.abs()"),
    ),
    *of("grpo_kernels/objective.py", OBJECTIVES,
        (
            "tokens of a group share a sequence's mean", "inner = batch.same_group() @ self._lengths(batch)",
            "inner = self._lengths(batch)",
        ),
        (
            "rows of a sequence without an advantage are left out", 'self.level in ("sequence", "sequence-sum") and',
            'self.level in ("sequence",) and',
        ),
        ("empty sequences count", "(self._lengths(batch) > 0).sum()", "(self._lengths(batch) >= 0).sum()"),
        (
            "denominators of their own are dropped", "if aggregate is None and own is None:", "if aggregate is None:",
            COMBINATIONS,
        ),
    ),
    *of("grpo_kernels/published.py", OBJECTIVES,
        ("DAPO's upper bound", '"dapo": {"surrogate": Clip(0.2, 0.28)},', '"dapo": {"surrogate": Clip(0.2, 0.2)},'),
        ("CISPO's cap", "Cispo(5.0)", "Cispo(4.0)"),
        ("verl's cap of DPPO", '"dppo_tv": {"surrogate": Cispo(3.0)', '"dppo_tv": {"surrogate": Cispo(5.0)'),
        ("OpenRLHF's KL", 'Kl("k1", clamp=10.0)', 'Kl("k3", clamp=10.0)', "tests/core/test_numerics.py"),
    ),
    *of("grpo_kernels/specs.py", "tests/core/test_head.py",
        ("a transform beside a head is dropped", "return replace(weight, transform=transform)", "return weight"),
    ),
    *of("grpo_kernels/rows/compile.py", "tests/core/test_compile.py",
        (
            "scale and softcap change places", "return transform.scale, transform.softcap, *numbers",
            "return transform.softcap, transform.scale, *numbers",
        ),
        (
            "rows of a temperature each have that of none",
            "inv_temperature if inv_temperatures is None else inv_temperatures", "inv_temperature",
        ),
        (
            "a number of a row is not counted in a graph", "Sparse(step, seed if seeds is None else seeds, first_row)",
            "Sparse(step, seed if seeds is None else seeds)",
        ),
    ),
    *of("grpo_kernels/model.py", "tests/core/test_model.py",
        ("rows predict themselves", "hidden[..., total - 1 - count : total - 1, :]", "hidden[..., total - count : total, :]"),
        ("an fp32 head is used in 16 bits", "torch.promote_types(hidden.dtype, head.weight.dtype)", "hidden.dtype"),
        (
            "the temperature replaces softcap and scale", "replace(self.transform, temperature=temperature)",
            "LogitTransform(temperature)", "tests/core/test_head.py",
        ),
    ),
    *of("grpo_kernels/architectures.py", "tests/core/test_architectures.py",
        ("a model's divisor multiplies", "Logits(scale=1.0 / getattr(config, entry))", "Logits(scale=getattr(config, entry))"),
    ),
    *of("grpo_kernels/layout.py", OBJECTIVES,
        ("the first token of a sequence is of the one before", "rows, right=True)", "rows, right=False)"),
        ("rows that touch overlap", "if step < extent:", "if step <= extent:", AUTOGRAD),
    ),
    *of("csrc/one_row.h", COMBINATIONS,
        (
            "lanes behind a row's end count", 'of[0].z = choose(first_lanes(rest), of[0].z, all(-INFINITY));\n        limit',
            "limit", OBJECTIVES,
        ),
        ("a sign where the shift is raised", "factor * (weighted - by * sum)", "factor * (weighted + by * sum)", OBJECTIVES),
        ("squares are shared once", "squares *= factor * factor;", "squares *= factor;"),
        ("the slope of the entropy lacks the transform", "k1(s.log * t.slope / sum)", "k1(s.log / sum)"),
        (
            "the entropy's gradient lacks its log-sum", "(s.constant - s.target - s.log * log_sum)", "(s.constant - s.target)",
            OBJECTIVES,
        ),
        (
            "the last elements are not scaled", 'for (; j < n; j++) {\n            T lanes[W];',
            'for (; j + 1 < n; j++) {\n            T lanes[W];',
        ),
        ("the largest id is where its block starts", "return int32_t(j + k);", "return int32_t(j);", SETS),
        (
            "the target's slope lacks the softcap", "double(t.slope) * (t.mode == CAPPED ? lane0(of.slope) : 1.0f)",
            "double(t.slope)",
        ),
        ("kept terms are all relative to the last shift", "exp(double(at.shift) - double(gradient.max))", "1.0", HOSTILE),
        ("a widened row begins anew at each block", "fetch<T, PLAIN>(x + j, n", "fetch<T, PLAIN>(x, n", HOSTILE),
    ),
    *of("csrc/two_rows.h", COMBINATIONS,
        (
            "a sign where both maxima are raised", "excess = g * excess - of_cross * cross",
            "excess = g * excess + of_cross * cross",
        ),
        (
            "the share of the student is that of the teacher", "spec.direction == JSD ? 1.0 - spec.mixture : 1.0)",
            "spec.direction == JSD ? spec.mixture : 1.0)",
        ),
        (
            "the two divergences of a mixture change places",
            "second.mixture * kl.teacher + (1.0 - second.mixture) * kl.student",
            "second.mixture * kl.student + (1.0 - second.mixture) * kl.teacher",
        ),
    ),
    *of("csrc/sparse.h", COMBINATIONS,
        ("a partial sum is left out", "add(sum[r][2], sum[r][3])", "sum[r][2]"),
        (
            "a key starts from the sum of the one before", "first = p >= job.count || places.key(p) != key;",
            "first = p >= job.count;",
        ),
    ),
    *of("csrc/select.h", "tests/rows/test_selection.py",
        (
            "the target's mass counts", "if (has_target && units[target - j] < WHOLE_STEP) sum -= int64_t(units[target - j]);",
            "",
        ),
    ),
    *of("csrc/products.cpp", COMBINATIONS,
        ("a block of ids forgets those before", "b ? out : nullptr", "nullptr"),
        (
            "every block of the width is the first", "job.hidden.at<Element>(begin, b * Blocks<Op>::LENGTH)",
            "job.hidden.at<Element>(begin, 0)",
        ),
        (
            "every block of rows is the first", "* PANEL_COLUMNS + b * BLOCK_UNITS * PANEL_COLUMNS", "* PANEL_COLUMNS",
            "tests/rows/test_cpu_products.py",
        ),
    ),
    *of("csrc/program.cpp", "tests/formulas/test_program.py",
        ("a NaN is no minimum", 'return a < b || a != a ? a : b; }\nfloat larger', 'return a < b ? a : b; }\nfloat larger'),
    ),
    *of("csrc/arguments.h", "tests/rows/test_raw_pointers.py",
        ("a vector of another length is taken", 'require(count == rows, "count", count, "one value a row is needed.");', ""),
        (
            "rows behind the last are taken",
            'require(end <= shape[0] * shape[1], "count", count, "there are not so many rows.");', "",
        ),
    ),
    *of("csrc/parallel.h", RELATIONS,
        ("a thread skips a range", "index = threads + taken.fetch_add", "index = threads + 1 + taken.fetch_add"),
    ),
    *of("grpo_kernels/rows/backends/triton/kernels.py", COMPILED,
        (
            "the target's logit lacks the transform",
            's, NAMES, "sum")\n        _put(partials, partials_stride, i, k * u, NAMES, "target")\n        _put(partials, partials_stride, i, w, NAMES, "weighted")\n        _put(partials, partials_stride, i, q, NAMES, "squares")\n        if',
            's, NAMES, "sum")\n        _put(partials, partials_stride, i, u, NAMES, "target")\n        _put(partials, partials_stride, i, w, NAMES, "weighted")\n        _put(partials, partials_stride, i, q, NAMES, "squares")\n        if',
        ),
        (
            "a slope is read one row early", "return tl.load(table + _row(NAMES, NAME) * stride + i)",
            "return tl.load(table + (_row(NAMES, NAME) - 1) * stride + i)",
        ),
        (
            "a row is scaled one element too far", "f).to(x.dtype.element_ty), mask=here < V)",
            "f).to(x.dtype.element_ty), mask=here <= V)",
        ),
        (
            "gradients of a part start at the first row",
            'out_row = out + _row_offset(first + i, T, out_stride_a, out_stride_t, ALIGNED)\n    if active:\n        inv_t',
            'out_row = out + _row_offset(i, T, out_stride_a, out_stride_t, ALIGNED)\n    if active:\n        inv_t',
        ),
        ("a sign of the entropy's slope", "-d_entropy * entropy, -d_entropy, 0.0", "d_entropy * entropy, -d_entropy, 0.0"),
        ("id 0 is not in use", 'id = tl.load(ids + s)\n    if id >= 0:', 'id = tl.load(ids + s)\n    if id > 0:'),
        (
            "an id that is not cut leaves its sum in a piece", "others = _is_at(ids, p + 2 * PIECE - 1, m, id)",
            "others = _is_at(ids, p + PIECE - 1, m, id)",
        ),
        (
            "columns are stored one place late", "place = count + tl.cumsum(taken, axis=0) - 1",
            "place = count + tl.cumsum(taken, axis=0)",
        ),
        ("no barrier before the gradient overwrites the teacher", "tl.debug_barrier()  # between", "# between"),
    ),
    *of("grpo_kernels/rows/backends/triton/one_row.py", COMPILED,
        ("a factor of the sum of squares is dropped", "d_prob * down * down", "d_prob * down"),
        ("no barrier before the target's store", "tl.debug_barrier()  # one store", "# one store"),
        ("the end of a peeled row is one element late", "i < head, here < V)", "i < head, here <= V)"),
        ("squares are rescaled once", "q = q * keep * keep + tl.sum", "q = q * keep + tl.sum"),
        (
            "a column behind the row counts", "u = tl.where(at + i * STEP + cols < V, u, _NEG_INF)",
            "u = tl.where(at + i * STEP + cols <= V, u, _NEG_INF)",
        ),
    ),
    *of("grpo_kernels/rows/backends/triton/two_rows.py", COMPILED,
        ("a sign where maxima are raised", "f * (w + s * (m - to))", "f * (w - s * (m - to))"),
        ("a factor of the sum of squares is dropped", "factor += quadratic * p", "factor += quadratic"),
    ),
    *of("grpo_kernels/rows/backends/triton/launch.py", COMPILED,
        ("a formula subtracts the other way round", '"sub": "{} - {}"', '"sub": "-{} + {}"'),
        ("a formula has a constant in place of a number", "used.append(k)", "used.append(0)"),
    ),
]
# fmt: on


def run(fault: Fault, copy: Path, everything: bool) -> bool:
    """Whether a test fails."""
    path = copy / fault.file
    text = path.read_text()
    assert text.count(fault.old) == 1, f"{fault.what}: {fault.file} has this text {text.count(fault.old)} times"
    path.write_text(text.replace(fault.old, fault.new))
    try:
        if fault.file.startswith("csrc"):
            subprocess.run(["cmake", "--build", str(copy / "build" / "faults"), "-j2"], check=True, capture_output=True)
            for module in (copy / "build" / "faults").glob("_cpu*.so"):
                shutil.copy(module, copy / "grpo_kernels")
        tests = [] if everything else fault.tests.split()
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
        return subprocess.run(command, cwd=copy, capture_output=True, timeout=1800).returncode == 1
    finally:
        path.write_text(text)


def main(words: list[str]) -> None:
    everything, words = "--all" in words, [word for word in words if word != "--all"]
    chosen = [f for f in FAULTS if not words or any(word in f.what or word in f.file for word in words)]
    missed = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "project"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv", "build", "dist"))
        if any(f.file.startswith("csrc") for f in chosen):
            subprocess.run(
                ["cmake", "-S", str(copy), "-B", str(copy / "build" / "faults"), f"-DPython_EXECUTABLE={sys.executable}"],
                check=True,
            )
        for fault in chosen:
            found = run(fault, copy, everything)
            print(f"{'found' if found else 'MISSED'}  {fault.file}: {fault.what}", flush=True)
            missed += [] if found else [fault]
    print(f"{len(chosen) - len(missed)} of {len(chosen)} faults found")
    sys.exit(bool(missed))


if __name__ == "__main__":
    main(sys.argv[1:])
