"""Small faults, each of which some test must find: the proof that the tests have power.

    python tests/faults.py [PART OF A NAME OR FILE ...] [--all]

copies the project, puts in one fault after the other, builds what is compiled where that is the faulty part, and runs the tests
that are named beside it, or with --all the whole quick suite. It ends with the faults that no test found. `test_structure.py` sees
to it that every fault still fits the code."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import venv
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
    """The faults of a file: (what, old, new), and the tests that find it where they are others
    than `tests`.
    """
    return [Fault(what, file, old, new, *(own or (tests,))) for what, old, new, *own in faults]


COMBINATIONS = "tests/core/test_combinations.py"
OBJECTIVES = "tests/core/test_objectives.py"
RELATIONS = "tests/core/test_relations.py"
AUTOGRAD = "tests/core/test_autograd.py"
COST = "tests/core/test_cost.py"
PRODUCTS = "tests/core/test_products.py"
SETS = "tests/core/test_rows.py"
RANKS = "tests/core/test_ranks.py"
HOSTILE = "tests/rows/test_sanitizers.py"
LISTED = "tests/core/test_listed.py"
NAN = "tests/core/test_nan.py"
ROWS = "tests/rows/test_row_kernels.py"
TWO_ROWS = "tests/rows/test_two_row_kernels.py"
COMPILED = "tests/rows/test_triton_compiled.py"
BENCHMARKS = "tests/benchmarks/test_benchmarks.py"
KIT = "tests/benchmarks/test_gpu_kit.py"
EXTRA_IDS = "tests/compositions/test_extra_ids.py"
CANDIDATES = "tests/compositions/test_candidates.py"
TEACHERS = "tests/compositions/test_teachers.py"
TRAINER_DRAFT = "tests/training/test_trainer_draft.py"
DRAFT_HEADS = "tests/compositions/test_draft_heads.py"
UNREAD = "tests/compositions/test_transforms_and_waits.py"
LINEAR_PASS = "tests/core/test_linear_pass.py"
BLOCKS = "tests/rows/test_blocks.py"
REFUSALS = "tests/core/test_refusals.py"
HEAD = "tests/core/test_head.py"
COMPILE = "tests/core/test_compile.py"
WAITS = "tests/core/test_waits.py"
COMPOSED = "tests/core/test_composed_arguments.py"

# fmt: off
FAULTS: list[Fault] = [
    *of(
        "grpo_kernels/core/matmuls.py",
        "tests/core/test_linear_pass.py",
        (
            "the bias's gradient is a sum of bf16",
            "return has_cpu_matmuls and dtype == torch.bfloat16 and not sums_bias",
            "return has_cpu_matmuls and dtype == torch.bfloat16",
        ),
        (
            "chunks of a block overwrite one another",
            "self.num_filled += len(grad_logits)\n\n\nclass ScaledGradBuffer", "pass\n\n\nclass ScaledGradBuffer",
            "tests/rows/test_blocks.py",
        ),
    ),
    *of(
        "grpo_kernels/composed_losses.py",
        "tests/core/test_combinations.py",
        (
            "the log-probs of a reference's head are over the vocabulary",
            "        (),\n        kept=batch.kept,", "        (),\n        kept=None,", "tests/core/test_rows.py",
        ),
        (
            "a detached entropy of a composed batch has a gradient",
            '    detached = () if objective.needs_entropy else ("entropy",)\n', "    detached = ()\n", "tests/core/test_products.py",
        ),
        (
            "a reference over sets is the divergence over the vocabulary",
            "is_dense_reference = reference is not None and batch.kept is None", "is_dense_reference = reference is not None",
        ),
        (
            "a batch with extra ids is a plain one",
            'fields = ("kept", "logp_terms", "prob_terms", "rows")', 'fields = ("kept", "rows")', "tests/core/test_listed.py",
        ),
        (
            "a teacher of some ids beside candidate sets",
            'require(batch.kept is None, reference_name, "TokenSets", TEACHER_WITH_SETS)', "pass", "tests/core/test_refusals.py",
        ),
    ),
    *of(
        "grpo_kernels/losses.py",
        "tests/core/test_products.py",
        ("all processed rows have a gradient", "return self.batch.named_mask(self.objective.gradient_mask)", "return self.rows.processed"),
        (
            "a sequence's entropy bonus has no gradient",
            "            and not self.objective.needs_entropy\n", "", "tests/core/test_objectives.py",
        ),
        (
            "a sequence's divergence is left out",
            "            and reference is None\n", "", "tests/core/test_combinations.py",
        ),
        (
            "a sequence's bias has no gradient",
            "            not (bias is not None and bias.requires_grad)\n            and not", "            not", "tests/core/test_linear_pass.py",
        ),
        (
            "an objective of the whole batch is by sequence",
            "            and self.objective.gradient_is_per_sequence\n", "",
        ),
        (
            "the log-ratio of a loss is that of other log-probs",
            "_log_ratio=result.log_ratios,", "_log_ratio=None if result.log_ratios is None else 0 * result.log_ratios,",
            "tests/core/test_composed_arguments.py",
        ),
        (
            "a loss is not divided by grad_scale",
            "result = result._replace(loss=result.loss / self.grad_scale)", "pass", "tests/core/test_grad_scale.py",
        ),
        (
            "the forward does not know grad_scale",
            "return self.tokens if self.grad_scale is None else self.tokens.weighted(self.grad_scale)", "return self.tokens",
            "tests/core/test_grad_scale.py",
        ),
        (
            "a gradient is in the forward whatever the options say",
            "is_traced() or options.grad_in_backward:", "is_traced():", "tests/core/test_grad_scale.py",
        ),
    ),
    *of(
        "grpo_kernels/loss_checks.py",
        "tests/core/test_grad_scale.py",
        ("a loss is divided by a scale of 0", "return torch.where(scale == 0, 1.0, scale)", "return scale"),
    ),
    *of(
        "grpo_kernels/core/linear.py",
        "tests/core/test_products.py",
        (
            "rows with a gradient do not come first",
            "torch.cat([row_ids, others.nonzero().flatten()])", "torch.cat([others.nonzero().flatten(), row_ids])",
        ),
        (
            "rows without a gradient are left out",
            "row_ids = torch.cat([row_ids, others.nonzero().flatten()])", "pass",
        ),
        (
            "on a GPU rows without a gradient come first",
            "torch.argsort(rank, stable=True, descending=True)", "torch.argsort(rank, stable=True)", "tests/core/test_waits.py",
        ),
    ),
    *of(
        "grpo_kernels/core/sources.py",
        "tests/core/test_cost.py",
        (
            "the version of overwritten logits stays",
            "torch.autograd.graph.increment_version(self.logits)", "pass", "tests/core/test_autograd.py",
        ),
        ("a gradient for memory of the caller is rounded", "weight.dtype if memory is None else torch.float32", "weight.dtype"),
        (
            "a pass for memory of the caller rounds",
            "blocks=blocks if wanted.any else None,\n                may_round_weight=memory is None,", "blocks=blocks if wanted.any else None,",
        ),
        (
            "a head without rows has no gradient",
            "if wanted.weight and grad_weight is None and memory is None:", "if False:", "tests/core/test_combinations.py",
        ),
        (
            "a backward for memory of the caller rounds",
            "            may_round_weight=memory is None,\n        )\n        grad_weight = gradients.weight\n        if memory is not None:",
            "        )\n        grad_weight = gradients.weight\n        if memory is not None:", "tests/core/test_linear_pass.py",
        ),
    ),
    *of(
        "grpo_kernels/inputs.py",
        "tests/core/test_linear_pass.py",
        (
            "what a gradient in place overwrites is not looked at",
            "                other_arguments or {},\n                reference_arguments or {},", "                {},\n                {},",
            "tests/core/test_autograd.py",
        ),
        (
            "memory for a gradient may be what is read",
            "            read |= {**(other_arguments or {}), **(reference_arguments or {})}\n", "            read = {}\n",
        ),
        (
            "a reference's head has the policy's transform",
            "return reference, transform if own_transform is None else own_transform", "return reference, transform", "tests/core/test_rows.py",
        ),
        ("a reference's bias is dropped", "reference = reference._replace(bias=bias[0])", "pass"),
        (
            "a transform beside a head is dropped",
            "        if transform is None:\n            transform = weight.transform\n", "        transform = weight.transform\n",
            "tests/core/test_head.py",
        ),
    ),
    *of(
        "grpo_kernels/logprobs.py",
        "tests/core/test_products.py",
        (
            "a mask does not reach a teacher",
            "teacher_divergence(source, reference, exact, mask=flat_mask)", "teacher_divergence(source, reference, exact, mask=None)",
        ),
        (
            "a target outside of the vocabulary is taken",
            "check_targets(targets, mask, source.vocab_size, isinstance(inputs, LogitsInput))", "pass", "tests/core/test_refusals.py",
        ),
    ),
    *of("grpo_kernels/core/softmax.py", f"{COMBINATIONS} {RANKS}",
        ("the shift of a shard's shifted sum is dropped", '(values["sum_exp_shifted"] + values["sum_exp"] * weights.shift)', 'values["sum_exp_shifted"]'),
        ("squares are weighted once", 'factor * factor * values["sum_exp_squared"]', 'factor * values["sum_exp_squared"]'),
        (
            "ids of a shard are not moved to its place", "ids + first_ids, no_id", "ids, no_id",
            RANKS,
        ),
        ("half the slope of the sum of squares", 'coefficients["prob"] = 2.0 * grads', 'coefficients["prob"] = 1.0 * grads'),
        (
            "what arrives at masked rows is used", 'return grad if mask is None else torch.where(mask, grad, 0.0)', 'return grad',
        ),
        ("masked rows keep a top_prob", 'values = torch.where(mask, values, 0.0)', 'pass', SETS),
    ),
    *of("grpo_kernels/core/divergence.py", COMBINATIONS,
        ("a wrong coefficient of psi", "1 / 24, 1 / 120", "1 / 24, 1 / 210", TWO_ROWS),
        ("a wrong coefficient of phi", "squared * (1 / 5 +", "squared * (1 / 7 +", TWO_ROWS),
        ("the sign of the distance of two rows", "close = (z - w) - distance", "close = (z - w) + distance"),
        ("the mixture's shares are those of the other stream", "-log_ratio, 1.0 - mixture)", "-log_ratio, mixture)"),
        ("the share of the student is that of the teacher", "p = (1.0 - mixture) * p", "p = mixture * p"),
        ("the sign of a total variation is turned", "0.5 * log_ratio.sign())", "-0.5 * log_ratio.sign())"),
        ("a total variation is a sum of |p - q|", "0.5 * larger * relative_difference", "larger * relative_difference"),
        ("a sign in the sums of parts", "(g - f) + f * shift", "(g - f) - f * shift", RANKS),
    ),
    *of("grpo_kernels/formulas/ops.py", COMBINATIONS,
        ("divergences lack their teacher's weight", "(weight * x).masked_fill_", "(1 * x).masked_fill_"),
    ),
    *of("grpo_kernels/core/memory.py", "tests/rows/test_blocks.py",
        ("memory is given out twice", "if block.lease() is None and num_bytes", "if num_bytes"),
        ("zeros are not written", "return empty(shape, dtype, device).zero_()", "return empty(shape, dtype, device)", AUTOGRAD),
    ),
    *of("grpo_kernels/core/vocab_parallel.py", RANKS,
        ("the gradient of padding is left as it was", "padding[row_ids // rows_per_group, row_ids % rows_per_group] = 0", "pass"),
        (
            "ids of a rank count from 0", "(1, rows.num_rows), self.shard.start, dtype", "(1, rows.num_rows), 0, dtype",
        ),
        ("sums of a second pass are those of one rank", "return self.shard.sum_over_ranks(local_sums)", "return local_sums", RANKS),
        (
            "a rank without columns has a target", "torch.full_like(rows.targets, -1)", "torch.zeros_like(rows.targets)",
            RANKS,
        ),
    ),
    *of("grpo_kernels/formulas/extra_id_terms.py", "tests/core/test_listed.py",
        ("a coefficient is doubled", "return term, values", "return term, 2 * values"),
        ("a probability has no gradient", "return term, term", "return term, 0 * term", EXTRA_IDS),
        ("the probability outside of a list is not bounded", ".clamp(min=LEAST_OUTSIDE)", ""),
        ("what a function returns is not looked at", "check_terms(function, returned, logps)", "pass"),
    ),
    *of("grpo_kernels/formulas/divergence.py", TEACHERS,
        ("the tail of a teacher has no lower bound", "(1.0 - sum_rows(q, offsets)).clamp(min=LEAST_TAIL)", "(1.0 - sum_rows(q, offsets))"),
        ("a mixture has the shares of the other", "share * kl_of_q + (1.0 - share) * kl_of_p", "share * kl_of_p + (1.0 - share) * kl_of_q"),
        ("the sum over ids alone lacks its difference", '"forward": q - p}', '"forward": p - q}'),
        ("renormalised rows are not shifted", "shifted = log_probs - largest[row_of_id]", "shifted = log_probs"),
    ),
    *of("grpo_kernels/formulas/centering.py", "tests/core/test_listed.py",
        ("the tail counts for nothing", "coefficient - r * p * unlisted_weight", "coefficient"),
        ("the tail's ratio is upside down", "logp=-r.log()", "logp=r.log()"),
        ("a trust region is not looked at", "self.trust.keeps(logp + trust_offset, sampler_logp + trust_offset, advantage)", "slope == slope"),
    ),
    *of("grpo_kernels/formulas/token_loss.py", "tests/core/test_listed.py",
        (
            "a token that is dropped takes its row's ids along", "ops.where(auxiliary_is_dropped, 0.0, policy_weight)",
            "ops.where(is_dropped, 0.0, policy_weight)",
        ),
    ),
    *of("grpo_kernels/formulas/token_loss.py", NAN,
        ("a NaN has no gradient", "policy_weight = ops.where(is_number, token.policy_weight, minimum)", "policy_weight = token.policy_weight"),
        ("a NaN advantage is not looked for", "ops.minimum(token.log_ratio, token.advantage)", "token.log_ratio"),
        ("a NaN old log-prob is not looked for", "minimum = ops.minimum(minimum, token.old_logp)", "pass"),
        ("a NaN entropy is not looked for", "minimum = ops.minimum(minimum, token.entropy)", "pass"),
        ("a NaN is outside of every trust region", "is_dropped | (is_number & ~is_trusted)", "is_dropped | ~is_trusted"),
    ),
    *of("grpo_kernels/formulas/token_loss.py", "tests/formulas/test_token_loss.py",
        ("a bounded ratio keeps its gradient", "ops.where(log_ratio == token.log_ratio, grad, 0.0)", "grad"),
        ("the ratio of a sequence weighs its KL", 'token_log_ratio if level == "sequence-sum" else log_ratio', "log_ratio"),
        ("the entropy bonus is not filtered", "entropy_weight = ops.where(is_low, 0.0, entropy_weight)", "pass"),
    ),
    *of("grpo_kernels/formulas/token_loss.py", "tests/rows/test_evaluate.py",
        ("a loss without a bonus has a gradient of the entropy", 'named["grad_entropy"] = None', "pass"),
        ("a sequence's log-ratio is not read", 'log_ratio = named.get("log_ratios")', "log_ratio = None", OBJECTIVES),
    ),
    *of("grpo_kernels/formulas/token_inputs.py", "tests/core/test_linear_pass.py",
        ("tokens take the divergence weights of others", ".index_select(1, token_ids)", ".index_select(1, token_ids.flip(0))"),
    ),
    *of("grpo_kernels/formulas/formula_keys.py", "tests/formulas/test_program.py",
        ("globals of a function are no part of its key", "key.append(_key(_value_of_name(function, name), function_numbers))", "pass"),
        ("what a function closes over is no part of its key", "key.append(_key(cell.cell_contents, function_numbers))", "pass"),
        ("a function that rebinds a global has a key", "if instruction.opcode in REBINDING:\n            return None", "pass"),
    ),
    *of("grpo_kernels/formulas/program.py", "tests/formulas/test_program.py",
        ("numbers are taken for conditions", "if not all(x.is_boolean for x in conditions):", "if False:"),
        ("a program is not compared with torch", "if self.is_compared:", "if True:"),
        ("1 and True are one constant", "repr(x) for x in operands", "x for x in operands"),
    ),
    *of("grpo_kernels/formulas/token_inputs.py", OBJECTIVES,
        ("a marked token keeps its old log-prob", "ops.where(old_logp >= ON_POLICY, logp, old_logp)", "old_logp"),
    ),
    *of("grpo_kernels/objective.py", OBJECTIVES,
        ("marks of tokens are not read", "is_on_policy = batch.on_policy_tokens", "is_on_policy = batch.on_policy_tokens & False"),
        ("a marked token counts in its sequence's ratio", "torch.where(inputs.old_logps >= ON_POLICY, on_policy,", "torch.where(inputs.old_logps > ON_POLICY * 10, on_policy,"),
    ),
    *of("grpo_kernels/formulas/filters.py", OBJECTIVES,
        ("a marked sequence has moved away", "torch.where(batch.on_policy_tokens, policy_logps, old_logps)", "old_logps", "tests/rewards/test_corrections.py"),
    ),
    *of("grpo_kernels/formulas/filters.py", NAN,
        ("a sequence that moved away drops a NaN advantage", "batch.spread(mean_advantage < 0)", "batch.spread(~(mean_advantage >= 0))"),
        ("a sequence that moved away drops a NaN log-prob", "torch.where(is_nan, torch.nan, differences)", "differences"),
        ("a sequence that moved away drops a NaN old log-prob", "is_nan | sampler_logps.isnan()", "is_nan"),
    ),
    *of("grpo_kernels/formulas/kl.py", NAN,
        ("a KL estimator hides a NaN", "value = value + nan_or_zero", "pass"),
        ("the clamps of a KL hide a NaN", "ops.where(is_inside, grad_both, nan_or_zero)", "ops.where(is_inside, grad_both, 0.0)"),
    ),
    *of("grpo_kernels/formulas/surrogates.py", NAN,
        ("GMPO hides a NaN log-ratio", "has_advantage | x.isnan()", "has_advantage"),
    ),
    *of("grpo_kernels/objective.py", NAN,
        ("an on-policy sequence hides a NaN", "torch.where(logps.isnan(), logps, 0.0)", "torch.zeros_like(logps)"),
        ("a filter of entropy hides a NaN", "entropy.isnan() & (policy_weight != 0)", "entropy.isnan() & False"),
    ),
    *of("grpo_kernels/losses.py", NAN,
        ("a log-prob of -inf beside a KL is accepted", "refuse_infinite_kl(out, options)", "pass"),
        ("log-probs of -inf that were given are accepted", "refuse_infinite_kl(out, DEFAULT_OPTIONS)", "pass"),
    ),
    *of("grpo_kernels/loss_checks.py", "tests/core/test_refusals.py",
        ("both references are taken", "if batch.ref_logps is not None:\n        raise ValueError(\"reference and", "if False:\n        raise ValueError(\"reference and"),
    ),
    *of("grpo_kernels/loss_checks.py", NAN,
        ("a reference of -inf is accepted", ', "ref_logps": rows.ref_logps}', "}"),
        ("infinite values of listed ids are accepted", "terms.values.isinf()", "terms.values.isnan()"),
        ("ids outside of a set are accepted", "is_outside & (terms.values != 0)", "is_outside & False"),
        ("a value of 0 outside of a set is refused", "is_outside & (terms.values != 0)", "is_outside"),
        ("a NaN among nll_weights is not looked for", ', "weights", "nll_weight"):', ', "weights"):', "tests/core/test_refusals.py"),
    ),
    *of("grpo_kernels/integrations/_tensors.py", "tests/integrations/test_bound_functions.py",
        ("padding of a head is an id", "is_first = sorted_ids >= 0", "is_first = sorted_ids >= -1"),
    ),
    *of("grpo_kernels/formulas/ops.py", "tests/formulas/test_surrogates.py",
        ("an overflow is a wrong slope", "        refuse_overflow(formula_name, value_and_slope, points)\n        worst", "        worst"),
        ("points far away hide a wrong slope", "if first_error.max() > tolerance:", "if False:"),
        ("slopes far away are not compared", "worst = int(error.argmax())", "return"),
        ("what overflows in fp32 passes", "for logp_in_dtype in (logp, logp.float()):", "for logp_in_dtype in (logp,):"),
        ("torch explains a branch of a formula", 'if "Boolean value of Tensor" not in str(error):', "if True:"),
    ),
    *of("grpo_kernels/core/backends/triton/softmax_rows.py", COMPILED,
        ("tanh of a negative number is positive", "return tl.where(x < 0.0, e, -e) / (2.0 + e)", "return -e / (2.0 + e)"),
    ),
    *of("grpo_kernels/objective.py", "tests/core/test_batch.py",
        ("a filter of signs without advantages", "return has_policy_term or any(f.reads_advantages for f in self.filters)", "return has_policy_term"),
        ("listed terms without advantages", "not isinstance(self.surrogate, NoPolicyTerm) or self.listed is not None", "not isinstance(self.surrogate, NoPolicyTerm)"),
    ),
    *of("grpo_kernels/integrations/_swap.py", "tests/integrations/test_trl_losses.py",
        ("each call is logged", "if self.counts[key] > 1 or os.environ", "if os.environ"),
        ("every rank logs", 'or os.environ.get("RANK", "0") != "0":', "or False:"),
    ),
    *of("grpo_kernels/checks.py", "tests/core/test_refusals.py",
        ("dapo_loss is dppo_kl", 'if name.split("_") == words:', "if False:"),
    ),
    *of("benchmarks/results.py", BENCHMARKS,
        ("a changed tree has the commit of a clean one", 'return f"{head}-dirty" if changed else head', "return head"),
    ),
    *of("benchmarks/machine.py", BENCHMARKS,
        ("a loaded machine is idle", "if load < BUSY * processors:", "if load < 9 * processors:"),
    ),
    *of("grpo_kernels/set_alignment.py", SETS,
        ("few targets are judged", "share <= MOST_OUTSIDE or tokens < FEWEST_TARGETS", "share <= MOST_OUTSIDE"),
        ("a share of half is fine", "share <= MOST_OUTSIDE or", "share <= 0.99 or"),
        (
            "a copy is looked at before it has arrived", "sent is not None and not sent.event.query()", "sent is None and False",
            "tests/core/test_waits.py",
        ),
    ),
    *of("grpo_kernels/losses.py", SETS,
        (
            "fp16 gradients are stored before the loss scale",
            "is_fp16 = source.logits.dtype == torch.float16 and torch.is_grad_enabled()", "is_fp16 = False", AUTOGRAD,
        ),
        
        ("token_weights are dropped", "tokens = tokens.weighted(", "tokens.weighted(", OBJECTIVES),
        
    ),
    *of("grpo_kernels/logprobs.py", COMBINATIONS,
        ("missing is not applied to the mask", "mask = narrow_mask(kept, targets, mask, missing)", "pass"),
        ("a detached entropy has a gradient", '("entropy",) if entropy == "detached" else ()', "()", COMPOSED),
        ("the mass of no sets", 'shaped["log_kept_mass"] = torch.zeros_like', 'shaped["log_kept_mass"] = torch.ones_like'),
        (
            "the temperature's square divides", "value = value / squared_inverse_temperature(",
            "value = value * squared_inverse_temperature(",
        ),
    ),
    *of("grpo_kernels/batch.py", "tests/core/test_batch.py",
        (
            "masked numbers are used",
            "torch.where(self.mask, torch.stack(list(tensors.values())), 0.0)", "torch.stack(list(tensors.values()))", OBJECTIVES,
        ),
        (
            "a loss takes more launches", "torch.logical_and(contributing, self.mask)",
            "(contributing != 0) & self.mask", "tests/core/test_waits.py",
        ),
        (
            "rows with an nll weight alone have no gradient", "contributing = torch.logical_or(contributing, nll_weights)", "pass",
        ),
        (
            "one advantage a sequence is read as one a token", "advantages = advantages[:, None]", "pass",
            "tests/rewards/test_advantages.py",
        ),
        ("outside_set counts masked tokens", "(counted & ~is_inside).sum()", "(~is_inside).sum()", SETS),
        ("a moved batch forgets the mask that it was given", 'arguments["mask"] = self._mask_before_missing', 'arguments["mask"] = self.mask'),
        (
            "an exchange of ranks is not made again",
            "            versions_of(sources),\n", "            [],\n", "tests/core/test_ranks.py",
        ),
        ("a segment's last token predicts the next segment", "is_target[..., 1:] & follows", "is_target[..., 1:]"),
        (
            "sets cross segments", "torch.where(has_next, next_token, -1).flatten()", "next_token.flatten()",
            "tests/core/test_batch.py",
        ),
    ),
    *of("grpo_kernels/token_sets.py", "tests/core/test_batch.py",
        ("offsets of joined sets are in another order", "offsets=offsets_from_counts(torch.cat([part.counts for part in parts]))", "offsets=offsets_from_counts(torch.cat([part.counts for part in parts[::-1]]))"),
        (
            "an id of the vocabulary's size passes", "if sets.largest_id < vocab:", "if sets.largest_id <= vocab:",
            "tests/core/test_refusals.py",
        ),
        (
            "a missing target stays in its set", "return is_empty | ~sets.contains(targets)",
            "return is_empty", COMBINATIONS,
        ),
        (
            "records go one row late", "is_generated = generated.flatten().cpu() != 0",
            "is_generated = generated.flatten().cpu().roll(1) != 0",
        ),
        ("a negative row is counted from the front", "[index.flatten().cpu()]", "[index.abs().flatten().cpu()]"),
    ),
    *of("grpo_kernels/sampler_filters.py", "tests/core/test_batch.py",
        ("top-p drops the id that crosses it", "mass_of_larger = mass.cumsum(-1) - mass", "mass_of_larger = mass.cumsum(-1)"),
        ("of equal ids one too few", "is_equal.cumsum(-1) <= num_equal_kept", "is_equal.cumsum(-1) < num_equal_kept"),
        ("the order of SGLang's rules", "(*by_top_k, *by_top_p, *by_min_p)", "(*by_min_p, *by_top_p, *by_top_k)"),
    ),
    *of("grpo_kernels/objective.py", OBJECTIVES,
        (
            "tokens of a group share a sequence's mean", "num_tokens = batch.same_group() @ num_tokens",
            "pass",
        ),
        (
            "rows of a sequence without an advantage are left out", 'is_sequence = self.level in ("sequence", "sequence-sum")',
            'is_sequence = self.level in ("sequence",)',
        ),
        ("empty sequences count", "(batch.lengths > 0).sum()", "(batch.lengths >= 0).sum()"),
        (
            "denominators of their own are dropped", "if aggregate is None and denominator is None:", "if aggregate is None:",
            COMBINATIONS,
        ),
        ("DAPO's upper bound", '"dapo": Objective(Clip(0.2, 0.28)),', '"dapo": Objective(Clip(0.2, 0.2)),', "tests/core/test_numerics.py"),
        ("CISPO's cap", "Cispo(5.0)", "Cispo(4.0)"),
        ("verl's cap of DPPO", '"dppo_tv": {"surrogate": Cispo(3.0)', '"dppo_tv": {"surrogate": Cispo(5.0)'),
        ("OpenRLHF's KL", 'Kl("k1", clamp=10.0)', 'Kl("k3", clamp=10.0)', "tests/core/test_numerics.py"),
    ),
    *of("grpo_kernels/model.py", "tests/core/test_model.py",
        ("rows predict themselves", "slice(total - 1 - count, total - 1)", "slice(total - count, total)"),
        ("an fp32 head is used in 16 bits", "torch.promote_types(hidden.dtype, head.weight.dtype)", "hidden.dtype"),
        (
            "the temperature replaces softcap and scale", "replace(self.transform, temperature=temperature)",
            "LogitTransform(temperature)", "tests/core/test_head.py",
        ),
    ),
    *of("grpo_kernels/architectures.py", "tests/core/test_model.py",
        ("a model's divisor multiplies", "Logits(scale=1.0 / config.logits_scaling)", "Logits(scale=config.logits_scaling)"),
        ("Inkling's divisor left out", "return Logits(scale=1.0 / config.logits_mup_width_multiplier)", "return Logits()"),
        ("Inkling's padding ids in the softmax", "if num_ids is not None and num_ids < config.vocab_size:", "if False:"),
    ),
    *of("grpo_kernels/checks.py", OBJECTIVES,
        ("the first token of a sequence is of the one before", "rows, right=True)", "rows, right=False)"),
    ),
    *of("grpo_kernels/overlap.py", AUTOGRAD,
        ("rows that touch overlap", "if step < extent:", "if step <= extent:"),
    ),
    *of("grpo_kernels/integrations/__init__.py", "tests/integrations/test_bound_functions.py",
        ("adapters(): one is left out", 'if not module.name.startswith("_")', 'if not module.name.startswith(("_", "slime"))'),
    ),
    *of("grpo_kernels/integrations/_swap.py", "tests/integrations/test_bound_functions.py",
        (
            "undo leaves late imports bound", '            for late_module, key in references_to(value, owner_name(module)):\n                setattr(late_module, key, theirs)\n',
            "",
        ),
        ("slopes never compared after a call without gradients", "if any(x.any() for x in wanted):", "if True:"),
        (
            "experimental: a function that was replaced inside a call stays", "    finally:\n        vars(home).update(theirs)",
            "    finally:\n        pass", "tests/integrations/test_trl_losses.py",
        ),
        (
            "the second place of a trainer's function is not looked at", "if isinstance(paths, str) else paths:",
            "if isinstance(paths, str) else paths[:1]:", "tests/integrations/test_replayed_sets.py",
        ),
        (
            "arguments in another order are taken", "    if given != taken[: len(given)]:",
            "    if False:", "tests/integrations/test_replayed_sets.py",
        ),
        (
            "slopes of a result that has none there are compared", 'if a.requires_grad and b.requires_grad\n        ]',
            "if a.requires_grad]", "tests/integrations/test_bound_functions.py",
        ),
        (
            "an unknown argument of a trainer is dropped", "elif value is not None and not _equal(value, defaults.get(name, _REQUIRED)):",
            "elif False:",
        ),
        (
            "an unknown argument without a name is dropped", '            if value is not None:\n                raise NotCovered(\n                    f"argument number',
            "            if False:\n                raise NotCovered(f\"argument number",
        ),
        ("the trainer's default of an argument is lost", "        passed = dict(our_defaults)", "        passed = {}"),
        ("an argument under another name is not found", "            matched[parameter.name] = str(renamed)", "            pass"),
        ("a function with other required arguments is bound", "    if unknown or lacking:", "    if False:"),
        (
            "an option of a newer trainer is not seen", "        if name not in known and value is not None and not _equal(value, parameter.default):",
            "        if False:",
        ),
        ("errors keep our names", "lambda match: names[match[0]], str(error))", "lambda match: match[0], str(error))"),
        (
            "undo leaves attributes that were not there", "            if theirs is ABSENT:\n                delattr(module, name)\n                continue\n",
            "", "tests/integrations/test_trl_runs.py",
        ),
    ),
    *of("grpo_kernels/integrations/_tensors.py", "tests/integrations/test_trainer_distillation.py",
        (
            "vocab-parallel heads: gradient of hidden states reduced twice", "group=group, reduce_hidden=False",
            "group=group", "tests/integrations/test_adapters_vocab_parallel.py",
        ),
        (
            "repeated ids: a second one has no log-prob", 'torch.searchsorted(sorted_ids, row_ids)',
            "torch.searchsorted(sorted_ids, row_ids, right=True) - 1",
        ),
        (
            "rows in which an id repeats are not noticed", "num_distinct.view(ids.shape[:-1])",
            "num_distinct.clone().fill_(ids.shape[-1]).view(ids.shape[:-1])",
        ),
        (
            "share of kept tokens in place of dropped ones", 'return 1 - out.metrics["kept"]',
            'return out.metrics["kept"]', "tests/integrations/test_policy_losses.py",
        ),
        (
            "CISPO's cap of TRL and Liger taken for a width", 'return Cispo(options.epsilon_high)',
            "return Cispo(1 + options.epsilon_high)", "tests/integrations/test_liger.py",
        ),
        (
            "VESPO's constants of TRL and Liger exchanged", "k_pos=options.vespo_k_pos,",
            "k_pos=options.vespo_k_neg,", "tests/integrations/test_trl_losses.py",
        ),
        (
            "a two-sided bound of a trainer dropped", "return Clip(low, high, bound)",
            "return Clip(low, high)", "tests/integrations/test_policy_losses.py",
        ),
    ),
    *of("grpo_kernels/integrations/areal.py", "tests/integrations/test_bound_functions.py",
        (
            "AReaL's logits overwritten unasked", "inplace = reuse_logits and can_be_overwritten(logits)",
            "inplace = can_be_overwritten(logits)",
        ),
        (
            "temperature left out of the entropy", 'temperature=temperature, group=tp_group, entropy=True, inplace=inplace\n',
            "group=tp_group, entropy=True, inplace=inplace\n",
        ),
    ),
    *of("grpo_kernels/integrations/liger.py", "tests/integrations/test_liger.py",
        ("VESPO's weight of a sequence counts at every token", "first = trained & (trained.cumsum(1) == 1)", "first = trained"),
        ("token count not divided by the ranks", "return at_least_one(items / ranks)", "return at_least_one(items)"),
        (
            "as_liger's LUSPO divides by the batch alone", "num_trained.float() / batch.targets.numel()",
            "num_trained.float() / len(batch.targets)",
        ),
        (
            "KL of masked tokens in the metric", "        kl = torch.where(rows.mask, kl, 0.0)\n",
            "        pass\n",
        ),
        (
            "log-probs of the first ids in place of the last", "ids = input_ids[:, input_ids.shape[1] - L :]",
            "ids = input_ids[:, :L]",
        ),
        (
            "Liger's JSD: ignored labels counted", "mask = None if shift_labels is None else shift_labels != self.ignore_index",
            "mask = None", "tests/integrations/test_trainer_distillation.py",
        ),
        (
            "Liger's slot: temperature of the trainer's object lost", "**{name: getattr(theirs, name) for name in names},\n        grad_scale=",
            '**{name: getattr(theirs, name) for name in names if name != "temperature"},\n        grad_scale=',
        ),
    ),
    *of("grpo_kernels/integrations/megatron.py", "tests/integrations/test_megatron.py",
        ("the gradient of gathered hidden states is summed twice", "reduce_hidden=not is_summed_elsewhere", "reduce_hidden=True"),
        ("the gradient of hidden states is a rank's share", "reduce_hidden=not is_summed_elsewhere", "reduce_hidden=False"),
        ("the backward of the gather does not sum", "dist.reduce_scatter_tensor(part, grad_whole, group=ctx.group)", "part.copy_(grad_whole.chunk(ranks)[dist.get_rank(ctx.group)])"),
        ("ids that pad the vocabulary are in the softmax", "VocabShard(rank * width, vocab_size, group", "VocabShard(rank * width, total, group"),
        ("the muP scale is left out", "scale=constant_scale(self.scale_logits)", "scale=1.0"),
        ("the loss mask is not used", "mask = loss_mask != 0", "mask = None"),
        ("the shared embedding is not used", "weight = self.shared_weight\n", "weight = None\n"),
        ("main_grad is not used", 'return getattr(weight, "main_grad", None)', "return None"),
        ("hooks of the output layer do not run", "if not isinstance(self.module, nn.Module):", "if True:"),
        ("a model without the hook stays without its last stage", "model.post_process = True", "pass"),
        ("offsets of context ranks are those of whole sequences", "return offsets // context_ranks", "return offsets"),
        ("a bias that the model drops is added", 'has_bias = not getattr(self.module, "skip_bias_add", False)', "has_bias = True"),
        ("an adapter around the output layer is not seen", "is_wrapped or not isinstance(weight, Tensor)", "not isinstance(weight, Tensor)"),
        ("a softcap is taken for a scale", "if not torch.allclose(scaled, scale * samples, rtol=1e-6, atol=0.0):", "if False:"),
    ),
    *of("grpo_kernels/integrations/slime.py", "tests/integrations/test_megatron_trainers.py",
        ("slime's padding ids are in the softmax", 'megatron.skip_logits(model, getattr(args, "vocab_size", None))', "megatron.skip_logits(model)"),
        ("slime's rows score other tokens", "        tokens[rows],\n", "        tokens[rows - 1],\n"),
        ("slime's temperature is left out", 'temperature=getattr(args, "rollout_temperature", 1.0)', "temperature=1.0"),
    ),
    *of("grpo_kernels/integrations/miles.py", "tests/integrations/test_megatron_trainers.py",
        ("miles' padding ids are in the softmax", 'megatron.skip_logits(model, getattr(args, "vocab_size", None))', "megatron.skip_logits(model)"),
        ("a sample without a response has tokens", "chunk_tokens[: len(chunk)]", "chunk_tokens"),
    ),
    *of("grpo_kernels/integrations/nemo_rl.py", "tests/integrations/test_megatron.py",
        ("NeMo-RL's targets are not shifted", "rows, target[:, 1:], head", "rows, target[:, :-1], head"),
        ("NeMo-RL's parts of a sequence are not gathered", "hidden = GatherSequence.apply(hidden, tp_group)", "hidden = hidden.repeat(ranks, 1, 1)"),
    ),
    *of("grpo_kernels/integrations/miles.py", "tests/integrations/test_replayed_sets.py",
        ("rows of context parallelism not reordered", "return sets[index].to(logits.device)", "return sets.to(logits.device)"),
    ),
    *of("grpo_kernels/integrations/nemo_rl.py", "tests/integrations/test_nemo_rl.py",
        ("sequences with a large error stay", "batch = replace(batch, mask=survivors)\n", "pass\n"),
        ("marked samples are weighted by their old log-probs", "torch.where(batch.on_policy, logps, batch.old_logps)", "batch.old_logps"),
        ("NeMo-RL's worker keeps the counts of all sequences", "return self.seq_logprob_error_threshold is not None", "return False"),
        ("an option of NeMo-RL that is not read is ignored", 'and not name.startswith("_") and not unset:', "and False:"),
        ("a weight that overflows is e^60", "unbounded = unbounded.masked_fill(overflows, 0.0)", "pass"),
        (
            "weights of kept sequences dropped", "return is_kept * unbounded, is_kept == 0",
            "return is_kept, is_kept == 0",
        ),
        ("gradient through a clamped KL", "ops.where(is_not_clamped, terms.grad_both, 0.0)", "terms.grad_both"),
        (
            "masked samples in a metric", "torch.where(mask.any(1), weights.amax(1), 1.0) * samples",
            "weights.amax(1)",
        ),
        (
            "NeMo-RL distillation: mask not shifted", 'mask = data["token_mask"].roll(-1, 1) * data["sample_mask"][:, None] != 0',
            'mask = data["token_mask"] * data["sample_mask"][:, None] != 0',
        ),
        (
            "NeMo-RL distillation: mass outside with the other sign", "- OUTSIDE * (1.0 - p.sum(-1))",
            "+ OUTSIDE * (1.0 - p.sum(-1))",
        ),
        (
            "weights of a forced ratio not those of the policy", "    old = logps\n",
            "    old = batch.sampler_logps\n",
        ),
        (
            "the KL beside a filter runs over its sets", 'scored.logps + scored.also["log_kept_mass"]',
            "scored.logps",
        ),
    ),
    *of("grpo_kernels/integrations/openrlhf.py", "tests/integrations/test_policy_losses.py",
        ("corrected GSPO's ratio against the old policy", "anchor = sampler if is_corrected and is_gspo else old_log_probs", "anchor = old_log_probs"),
        (
            "denominator not divided by the ranks", "normalizer = None if total is None else at_least_one(total) / dp_size",
            "normalizer = None if total is None else at_least_one(total)",
        ),
    ),
    *of("grpo_kernels/integrations/prime_rl.py", "tests/integrations/test_policy_losses.py",
        ("marks of a sequence are not read", 'getattr(inputs, "on_policy", None)', "None"),
    ),
    *of("grpo_kernels/integrations/prime_rl.py", "tests/integrations/test_bound_functions.py",
        (
            "inverse temperature taken for the temperature", "temperature=1.0 / inv_temperature.float()",
            "temperature=inv_temperature.float()",
        ),
    ),
    *of("grpo_kernels/integrations/skyrl.py", "tests/integrations/test_policy_losses.py",
        (
            "every loss anchored to the sampler", 'anchored = name in ("dppo_tv", "dppo_kl", "rollout_is") and rollout_logprobs is not None',
            "anchored = rollout_logprobs is not None",
        ),
        (
            "a set that lists an id twice is taken", "& (sorted_ids[..., 1:] >= 0)",
            "& (sorted_ids[..., 1:] > 10**6)", "tests/integrations/test_replayed_sets.py",
        ),
    ),
    *of("grpo_kernels/integrations/slime.py", "tests/integrations/test_replayed_sets.py",
        (
            "every response has the sets of the first", "        num_numbered += response_length\n",
            "        pass\n",
        ),
        (
            "KL left in pg_loss", "+ entropy_term - kl_term", "+ entropy_term", "tests/integrations/test_policy_losses.py",
        ),
    ),
    *of("grpo_kernels/integrations/trl.py", "tests/integrations/test_trl_losses.py",
        (
            "accumulation left out of the denominator by items", "items * accumulation(trainer) / trainer",
            "items / trainer",
        ),
        (
            "corrected and plain KL swapped", 'if not options.use_bias_correction_kl:',
            'if options.use_bias_correction_kl:',
        ),
        ("tool mask dropped", "mask=packed(\"tool_mask\"),", "mask=None,"),
        (
            "entropy bonus not divided by accumulation", "options.entropy_coef / accumulation(trainer)",
            "options.entropy_coef",
        ),
        (
            "Dr. GRPO's budget dropped", "max_tokens=options.max_completion_length,", "max_tokens=1,",
        ),
        ("sequences begin where others end", "cu_seqlens=offsets_of(is_completion.sum(1)),", "cu_seqlens=offsets_of(is_completion.sum(1).flip(0)),"),
        ("log-probs of a loss without gradients left to TRL", "if loss is None and torch.is_grad_enabled():", "if loss is None:", "tests/integrations/test_trl_runs.py"),
        (
            "TRL's sets dropped in the loss", "logps = linear_logprobs(hidden, head, targets, mask=mask, kept=sets).logps",
            "logps = linear_logprobs(hidden, head, targets, mask=mask).logps", "tests/integrations/test_trl_runs.py",
        ),
        (
            "TRL's sets: entropy over the sets", "mask=mask, entropy=entropy).entropy", "mask=mask, entropy=entropy, kept=sets).entropy",
            COMPOSED,
        ),
        (
            "TRL's scores with an unknown argument fail", "            if loss is not None:  # the whole loss is left to TRL\n                raise\n",
            "            raise\n", "tests/integrations/test_trl_runs.py",
        ),
        (
            "logit scale of the model left out", 'LogitTransform(float(temperature), final_logit_softcapping, float(logit_scale)),\n        )\n        sets',
            "LogitTransform(float(temperature), final_logit_softcapping))\n        sets", "tests/integrations/test_trl_runs.py",
        ),
        (
            "auxiliary loss not divided by accumulation", "loss = loss + trainer.router_aux_loss_coef * call.aux_loss / accumulation(trainer)",
            "loss = loss + trainer.router_aux_loss_coef * call.aux_loss", "tests/integrations/test_trl_runs.py",
        ),
        ("strict tolerance of entropies too wide", 'require_close("entropy", ours.grad_entropy, grad_entropies, 0.0)', 'require_close("entropy", ours.grad_entropy, grad_entropies, floor)'),
        (
            "ignored labels counted", "return None if x is None else torch.where(counted, x, 0.0)",
            "return x", "tests/integrations/test_trl_runs.py",
        ),
        (
            "gradient of a gathered head not averaged", "        gradient = gradient / mesh.size()\n        for dim",
            "        for dim", "tests/integrations/test_trl_ranks.py",
        ),
        (
            "TRL replay: sets of the first completions for all batches", "            self._next_sets = self._next_sets[num_rows:]\n",
            "", "tests/integrations/test_trl_losses.py",
        ),
        (
            "TRL replay: tool tokens take sets of sampled ones", "row[: len(is_generated)] = torch.as_tensor(is_generated) != 0",
            "row[: len(is_generated)] = True", "tests/integrations/test_trl_losses.py",
        ),
        (
            "TRL distillation: divisor ignored", "normalizer=num_items_in_batch,",
            "", "tests/integrations/test_trainer_distillation.py",
        ),
    ),
    *of("grpo_kernels/integrations/unsloth.py", "tests/integrations/test_bound_functions.py",
        (
            "logits multiplied where they are divided", "(logit_scale_multiply or 1.0) / (logit_scale_divide or 1.0)",
            "(logit_scale_multiply or 1.0) * (logit_scale_divide or 1.0)",
        ),
    ),
    *of("grpo_kernels/integrations/verl.py", "tests/integrations/test_policy_losses.py",
        (
            "step's denominator not divided by the ranks", "    return at_least_one(total) / ranks",
            "    return at_least_one(total)",
        ),
        (
            "loss_scale_factor left out of the step's denominator", "        total = total * objective.max_tokens\n",
            "        pass\n",
        ),
        (
            "verl's default head not replaced", '        slots.bind(fused_linear_for_ppo, attribute="forward", method=True)\n', "        pass\n",
            "tests/integrations/test_bound_functions.py",
        ),
        (
            "options of verl's head ignored", "    if unknown is not None:\n        raise NotCovered(f\"option",
            "    if False:\n        raise NotCovered(f\"option", "tests/integrations/test_bound_functions.py",
        ),
        (
            "verl's temperatures of a flat row keep their shape", "temperature.reshape(ids.shape) if temperature.numel() == ids.numel() else temperature",
            "temperature", "tests/integrations/test_bound_functions.py",
        ),
        ("CISPO's lower bound dropped", 'Cispo(cap=1 + cap, low=1 - low)', 'Cispo(cap=1 + cap)'),
        (
            "DPPO's lower clip fraction counts filtered tokens", 'LOWER_CLIPPED_SHARE: (ratio > high) & is_kept',
            'LOWER_CLIPPED_SHARE: ratio > high',
        ),
        (
            "verl distillation: masses of padding kept", "return log_probs.detach().exp().sum(-1).masked_fill(~is_counted, 0.0)",
            "return log_probs.detach().exp().sum(-1)", "tests/integrations/test_trainer_distillation.py",
        ),
        (
            "GSPO's aggregation is the mode's before 0.9.1", 'range(9)), "0.9.0")', 'range(9)),)',
        ),
    ),
    *of("grpo_kernels/plugins/__init__.py", "tests/plugins/test_plugins.py",
        (
            "a plugin forgets what it has bound", "            DONE[plugin] = act()",
            "            act()\n            DONE[plugin] = None",
        ),
    ),
    *of("grpo_kernels/plugins/slime.py", "tests/plugins/test_plugins.py",
        ("slime's plugin never replays", 'replay = getattr(args, "rollout_top_p", 1.0) < 1.0', "replay = False"),
    ),
    *of("grpo_kernels/formulas/kl.py", "tests/core/test_objectives.py",
        ("a weight that is declared has a slope", "return weight * value, weight * slope\n\n    def with_weight_at", "return weight * value, weight * slope + value\n\n    def with_weight_at"),
        ("the weight of a KL is not held", "self.weight(fixed_logp.to(logp.dtype), old_logp", "self.weight(logp, old_logp", "tests/formulas/test_surrogates.py"),
        ("SDAR's gate is upside down", "ops.sigmoid(5.0 * (ref_logp - logp))", "ops.sigmoid(5.0 * (logp - ref_logp))", "tests/core/test_objectives.py"),
    ),
    *of("grpo_kernels/formulas/filters.py", OBJECTIVES,
        ("errors of masked tokens count", "total = batch.sequence_sum(torch.where(trained, error, 0.0))", "total = batch.sequence_sum(error)"),
        ("a sequence with a NaN is dropped", "is_kept = ~(errors > self.threshold)", "is_kept = errors <= self.threshold", NAN),
    ),
    *of("grpo_kernels/objective.py", OBJECTIVES,
        ("the gradient of a sequence's log-ratio does not reach its tokens", "losses._replace(grad_logps=losses.grad_logps + grad_logps)", "losses"),
        ("the gradient of a mean is that of a sum", "grad_terms = self._reduce(grad_log_ratios)", "grad_terms = self.batch.spread(self.batch.sequence_sum(grad_log_ratios), torch.float32)"),
        ("masked tokens are part of a sequence's ratio", "terms = torch.where(inputs.loss_mask, terms, 0.0)", "pass"),
        ("masked tokens have the gradient of their sequence", "grad_terms = torch.where(self.mask, grad_terms, 0.0)", "pass"),
    ),
    *of("grpo_kernels/losses.py", "tests/core/test_waits.py",
        ("torch evaluates a formula on vectors", "if self.kernels is None:", "if True:"),
        (
            "torch evaluates the formula of given log-probs", "None if is_traced() else pick_kernels(DEFAULT_OPTIONS,", "None if True else pick_kernels(DEFAULT_OPTIONS,",
            "tests/rows/test_evaluate.py",
        ),
    ),
    *of("grpo_kernels/objective.py", OBJECTIVES,
        ("dropped sequences keep their KL", 'aggregates = {"policy_weight": policy, "kl_weight": kl, "entropy_weight": entropy}', 'aggregates = {"policy_weight": policy, "entropy_weight": entropy}'),
        ("dropped sequences count in the denominators", "self._denominator_ratio(keep, batch, aggregate)", "1.0"),
        ("dropped sequences keep their NLL", "torch.where(keep, inputs.nll_weight, 0.0)", "inputs.nll_weight"),
        ("the mean of a group is over its dropped tokens", "batch.spread(token_ratio * count_ratio)", "batch.spread(count_ratio)"),
    ),
    *of("grpo_kernels/formulas/future_kl.py", "tests/formulas/test_future_kl.py",
        ("the future of a sequence is the next sequence", "torch.where(is_same_sequence, math.exp(log_gamma * reach) * sums[reach:], 0.0)", "math.exp(log_gamma * reach) * sums[reach:]"),
        ("the discount does not grow", "math.exp(log_gamma * reach)", "math.exp(log_gamma)"),
        ("a token that moved far counts", "is_summed = batch.trained & ~(log_ratios > math.log(self.cutoff))", "is_summed = batch.trained", OBJECTIVES),
        ("advantages below 0 are amplified", "torch.where(is_unsafe, weights.clamp(*SAFE_WEIGHTS), weights)", "weights", OBJECTIVES),
        ("marked tokens of known log-probs keep their old ones", "torch.where(batch.on_policy_tokens, logps, old_logps)", "old_logps"),
    ),
    *of("grpo_kernels/rewards/returns.py", "tests/rewards/test_advantages.py",
        ("RLSD ignores the sign of the advantage", "(flat_advantages.sign() * log_ratio).clamp(max=LOG_RATIO_BOUND)", "log_ratio.clamp(max=LOG_RATIO_BOUND)"),
        ("RLSD changes advantages above 0", "torch.where(flat_advantages < 0, weight, 1.0)", "weight"),
    ),
    *of("grpo_kernels/rewards/advantages.py", "tests/rewards/test_advantages.py",
        (
            "leave-one-out: the factor n / (n - 1) skipped",
            "return g.centred * g.size / (g.size - 1.0).clamp(min=1.0), is_zero", "return g.centred, is_zero",
        ),
        ("equal rewards are not set to 0", "is_zero = ~g.counted | g.equal", "is_zero = ~g.counted"),
        ("maxrl: a mean below 0 divides", "is_zero = is_zero | (g.mean <= 0)", "pass"),
        ("singleton=raw: not divided by 1 + eps", "torch.where(is_alone, 1.0 + eps, divisor)", "torch.where(is_alone, 1.0, divisor)"),
        ("lengths of missing completions count", "weights = torch.where(g.counted, num_tokens, 0.0)", "weights = num_tokens"),
        (
            "pass@k: a group of one gets its reward",
            "lead = torch.where((g.values > second) & (g.size > 1), g.values - second, 0.0)",
            "lead = torch.where(g.values > second, g.values - second.clamp(min=0), 0.0)",
        ),
        ("a2po: a factor skipped", "return (g.highest + beta * mean.log())", "return (g.highest + mean.log())"),
        ("all_correct of the best", '"all_correct": g.lowest >= right', '"all_correct": g.highest >= right'),
        (
            "gdpo: 0 where one function cannot tell", 'for _, is_zero in columns]).all(0)',
            'for _, is_zero in columns]).any(0)',
        ),
        (
            "nemo-rl: std of the others cancels", "sum_squares = torch.where(is_furthest, groups.sum(differences * differences), sum_squares)",
            "pass",
        ),
        (
            "batch scale of the group", "GroupStatistics(Groups(), g.values, g.counted).std(unbiased) + eps", "g.std(unbiased) + eps",
        ),
    ),
    *of("grpo_kernels/rewards/returns.py", "tests/rewards/test_advantages.py",
        (
            "gae: the value of a masked token", "next_values = tokens.next_values(value_from_here)",
            "next_values = tokens.next_values(flat_values)",
        ),
        (
            "returns flow into the sequence before", "self.sequence_ids.diff(append=no_sequence) == 0",
            "self.sequence_ids.diff(append=no_sequence) >= 0",
        ),
        (
            "a masked token is discounted", "torch.where(self.trained, decay * torch.ones_like(x), 1.0)",
            "decay * torch.ones_like(x)",
        ),
        (
            "optimal token baseline: weights not squared", 'token_variance = token_variance * tokens.values("weights", weights).square()',
            'token_variance = token_variance * tokens.values("weights", weights)',
        ),
        ("a scan one pass too short", "while reach < self.longest:", "while 2 * reach < self.longest:"),
        ("a sum up to a token lacks it", "- self.discounted_sums(1.0, x) + x", "- self.discounted_sums(1.0, x)", "tests/rewards/test_advantages.py"),
    ),
    *of("grpo_kernels/rewards/groups.py", "tests/rewards/test_advantages.py",
        ("a quarter of single completions is silent", "num_single < MANY_SINGLE * num_groups", "num_single <= MANY_SINGLE * num_groups"),
        ("rewards that are NaN are always left out", '    if missing_rewards == "skip":\n', "    if True:\n"),
        ("whiten: always biased", '/ (self.size - int(unbiased)).clamp(min=1.0)', "/ self.size.clamp(min=1.0)"),
        ("neighbouring groups are one", "sorted_ids.diff(prepend=sorted_ids[:1]) != 0", "sorted_ids.diff(prepend=sorted_ids[:1]) > 1"),
        (
            "a mean over missing rewards too", "self.mean = groups.sum(values) / self.size.clamp(min=1.0)",
            "self.mean = groups.sum(values) / groups.sum(torch.ones_like(values))", "tests/rewards/test_advantages.py",
        ),
        (
            "rewards without their weights", "sum(factor * column for", "sum(column for",
            "tests/training/test_trainer_report.py tests/rewards/test_advantages.py",
        ),
    ),
    *of("grpo_kernels/rewards/estimators.py", "tests/rewards/test_advantages.py",
        ("maxrl: the wrong default eps", '{"scale": "mean", "eps": 0.0}', '{"scale": "mean"}'),
        (
            "reinforce_pp forgets gamma", "discounted_returns(token_rewards, gamma=gamma, **evidence.token_arguments)",
            "discounted_returns(token_rewards, **evidence.token_arguments)",
        ),
        (
            "packed rows taken for one sequence",
            "gae(token_rewards, values, gamma=gamma, lam=lam, **evidence.token_arguments)",
            "gae(token_rewards, values, gamma=gamma, lam=lam, mask=evidence.mask)",
        ),
    ),
    *of("grpo_kernels/rewards/corrections.py", "tests/rewards/test_corrections.py",
        ("a mean over one token too many", "batch.sequence_sum(x) / num_trained.clamp(min=1.0)", "batch.sequence_sum(x) / (num_trained + 1.0)"),
        (
            "the upper bound excluded", "torch.where((w >= low) & (w <= high), w, 0.0)",
            "torch.where((w >= low) & (w < high), w, 0.0)",
        ),
        (
            "masked sequences in the mean weight", "total = torch.stack([torch.where(counted, w, 0.0).sum(), counted.sum()])",
            "total = torch.stack([w.sum(), counted.sum()])",
        ),
        ("k3: a sign", "x = x.exp() - 1.0 - x", "x = x.exp() - 1.0 + x"),
        ("masked tokens in a sequence's extreme", "trained_x = torch.where(batch.trained, x, nothing)", "trained_x = x"),
        (
            "m2po: a mean at the threshold", "below = torch.where(rank < middle, ordered, 0.0).sum() < threshold * middle",
            "below = torch.where(rank < middle, ordered, 0.0).sum() <= threshold * middle",
        ),
        ("std around 1", '"ratio_std": ratio.std(unbiased=False)', '"ratio_std": mean((w - 1).square()).sqrt()'),
        ("a correction forgets the weights", "weights = weights * earlier_weights.view(weights.shape)", "pass"),
        ("metrics of nothing are not 0", "torch.where(ratio.size > 0, value, 0.0)", "value", "tests/rewards/test_corrections.py"),
    ),
    *of("grpo_kernels/formulas/filters.py", "tests/rewards/test_corrections.py",
        (
            "the ratio upside down", "torch.nan_to_num(a_logps.double() - b_logps.double(), nan=0.0)",
            "torch.nan_to_num(b_logps.double() - a_logps.double(), nan=0.0)",
        ),
        (
            "off-policy: bounds excluded", "batch.spread(mean_difference > delta)", "batch.spread(mean_difference >= delta)",
        ),
        ("off-policy: each token's own sign decides", 'if advantage_of == "token":', "if True:"),
        (
            "off-policy: one advantage below 0 drops the sequence", "batch.spread(mean_advantage < 0)",
            "batch.spread(batch.sequence_sum(advantages < 0) > 0)",
        ),
    ),
    *of("grpo_kernels/rewards/entropy.py", "tests/rewards/test_corrections.py",
        ("a quantile off by one", "position = (1.0 - share) * (count - 1)", "position = (1.0 - share) * count"),
        ("masked tokens in the quantile", "(mask.flatten() != 0) & values.isfinite()", "values.isfinite()"),
        (
            "the coefficient at the target", "return self._coef if self._entropy <= self.target else 0.0",
            "return self._coef if self._entropy < self.target else 0.0",
        ),
        (
            "the lower end of the range", "max(self._coef - self.step, self.low)", "max(self._coef - self.step, 0.0)",
        ),
    ),
    *of("grpo_kernels/training/policy.py", "tests/training/test_trainer_update.py",
        (
            "positions count the padding", "return (attention.long().cumsum(1) - 1).clamp(min=0)",
            "return torch.arange(attention.shape[1]).expand_as(attention)",
        ),
    ),
    *of("grpo_kernels/training/rollouts.py", "tests/training/test_trainer_update.py",
        (
            "the end of the range chooses a token of probability 0",
            "chosen = torch.where(probs.gather(-1, chosen) > 0, chosen, probs.argmax(-1, keepdim=True))", "pass",
        ),
        ("searchsorted on the wrong side", "right=True).clamp", "right=False).clamp"),
        (
            "no temperature when drawing", "probs = (logits.float() / temperature).softmax(-1)",
            "probs = logits.float().softmax(-1)",
        ),
        (
            "ends of the generation config forgotten",
            'ids = {*configured, self.tokenizer.eos_token_id} - {None}',
            "ids = {self.tokenizer.eos_token_id} - {None}",
        ),
        ("positions of generated tokens off by one", "position_ids = position_ids[:, -1:] + 1", "position_ids = position_ids[:, -1:] + 2"),
        ("sampling never ends", "unfinished = unfinished & ~torch.isin(input_ids, end_ids)", "pass"),
        (
            "sets of other tokens", "token_rows = torch.arange(num_tokens, device=mask.device).view(width, num_completions).T",
            "token_rows = torch.arange(num_tokens, device=mask.device).view(num_completions, width)",
        ),
        (
            "accuracy of the total above 1", "(scores.each[0] >= 1).double()", "(scores.totals > 1).double()",
            "tests/training/test_trainer_report.py",
        ),
        ("the wrong completions are dropped", "row_ids = row_ids[has_gradient]", "row_ids = row_ids[~has_gradient]"),
        ("padding is trained on", "mask=mask, weights=weights", "weights=weights"),
        (
            "weights of other completions", "None if batch.weights is None else batch.weights[rows]",
            "None if batch.weights is None else batch.weights[: len(rows)]",
        ),
    ),
    *of("grpo_kernels/training/trainer.py", "tests/training/test_trainer_ranks.py",
        ("gradients of ranks are averaged, not added", "global_normalizer(self.objective, whole_batch) / self.ranks.world", "global_normalizer(self.objective, whole_batch)"),
    ),
    *of("grpo_kernels/training/policy.py", "tests/training/test_trainer_ranks.py",
        ("the optimizer's moments are not loaded", "        for optimizer in optimizers:\n            checkpoint.set", "        for optimizer in ():\n            checkpoint.set"),
    ),
    *of("grpo_kernels/training/trainer.py", "tests/training/test_trainer_update.py",
        ("old log-probs of the update before", 'if k == 0 and config.ratio_to == "policy":', 'if config.ratio_to == "policy":'),
        (
            "every step samples the same",
            "generator = torch.Generator(self.device).manual_seed(config.seed * 1_000_003 + self.step)",
            "generator = torch.Generator(self.device).manual_seed(config.seed)",
        ),
        (
            "learning rate of another update", "optimizer_metrics = self.move(config.lr_at(self.step * config.num_updates + k))",
            "optimizer_metrics = self.move(config.lr_at(self.step + k))",
        ),
        (
            "reference refreshed at another step", "and self.step % config.ref_refresh_steps == 0\n",
            "and self.step % config.ref_refresh_steps == 1\n",
            "tests/training/test_trainer_update.py tests/training/test_trainer_resume.py",
        ),
        ("a step with NaN", "        if finite:\n", "        if True:\n"),
        (
            "random state of the start is saved", "        self.rng = random_state(self.device)\n        return (\n            scores",
            "        return (\n            scores", "tests/training/test_trainer_resume.py",
        ),
    ),
    *of("grpo_kernels/training/report.py", "tests/training/test_trainer_resume.py",
        ("lines of steps that come again stay", "            file.truncate(min(self.sizes.get(name, 0), file.tell()))", "            pass"),
    ),
    *of("grpo_kernels/training/saving.py", "tests/training/test_trainer_resume.py",
        ("no checksum", "        if archive.testzip() is not None:", "        if False:"),
    ),
    *of("grpo_kernels/core/backends/triton/kernels.py", COMPILED,
        ("the target's logit lacks the transform", "target_logit = row.u_to_z * target_u", "target_logit = target_u"),
        (
            "a coefficient is read one row early", "x = tl.load(table + row_of_name(NAMES, COEFFICIENT_NAMES, k) * stride + i)",
            "x = tl.load(table + (row_of_name(NAMES, COEFFICIENT_NAMES, k) - 1) * stride + i)",
        ),
        ("programs of vectors begin one row apart", "rows = tl.program_id(0).to(tl.int64) * TILE.BLOCK + tl", "rows = tl.program_id(0) + tl"),
        (
            "the outputs of a formula on vectors change places", "tl.store(output, loss_and_gradients[k], mask",
            "tl.store(output, loss_and_gradients[NUM_OUTPUTS - 1 - k], mask",
        ),
        ("a row is scaled beyond its end", "if start + TILE.BLOCK <= num_columns:", "if start <= num_columns:"),
        (
            "gradients of a range start at the first row",
            "    values, has_gradient = load_coefficients(coefficients, coefficients_stride, i, NAMES)\n"
            "    out_row = row_pointer(out, first_row + i, T",
            "    values, has_gradient = load_coefficients(coefficients, coefficients_stride, i, NAMES)\n"
            "    out_row = row_pointer(out, i, T",
        ),
        ("a sign of the entropy's gradient", "-grad_entropy * entropy,", "grad_entropy * entropy,"),
        ("no barrier before the gradient overwrites the reference", "tl.debug_barrier()\n        end = (V - 1)", "end = (V - 1)"),
    ),
    *of("grpo_kernels/core/backends/triton/pair_kernels.py", COMPILED,
        ("id 0 is not in use", "id = tl.load(ids + pair)\n    if id >= 0:", "id = tl.load(ids + pair)\n    if id > 0:"),
        (
            "an id that is not cut leaves its sum in a piece", "has_next_piece = is_id_at(ids, position + 2 * PIECE - 1, num_pairs, id)",
            "has_next_piece = is_id_at(ids, position + PIECE - 1, num_pairs, id)",
        ),
    ),
    *of("grpo_kernels/core/backends/triton/softmax_rows.py", COMPILED,
        ("a factor of the sum of squares is dropped", "prob * down * down", "prob * down"),
        ("no barrier before the target's store", "tl.debug_barrier()  # the store follows", "# the store follows"),
        ("the end of a peeled row is one element late", "i < head, columns < row.V)", "i < head, columns <= row.V)"),
        ("squares are rescaled once", "squared = squared * scale * scale + tl.sum", "squared = squared * scale + tl.sum"),
        (
            "a column behind the row counts", "is_inside = piece_columns(start, i, row.columns) < row.V\n",
            "is_inside = piece_columns(start, i, row.columns) <= row.V\n",
        ),
    ),
    *of("grpo_kernels/core/backends/triton/divergence_rows.py", COMPILED,
        ("a sign where maxima are raised", "policy_factor * (shifted + sum_exp * (max_logit - base))", "policy_factor * (shifted - sum_exp * (max_logit - base))"),
        ("a factor of the sum of squares is dropped", "factor += per_exp_squared * p", "factor += per_exp_squared"),
        ("the smaller probability has the larger one's weight", "half_sign(d) * tl.where(policy_is_larger, 1.0, ratio)", "half_sign(d)"),
    ),
    *of("grpo_kernels/core/backends/triton/launch.py", COMPILED,
        ("a formula subtracts the other way round", '"sub": "{} - {}"', '"sub": "-{} + {}"'),
        ("a formula has a constant in place of a number", "numbers_taken.append(k)", "numbers_taken.append(0)"),
    ),
    *of("benchmarks/cases.py", BENCHMARKS,
        ("clip bounds swapped", "ratio.clamp(1 - low, 1 + high)", "ratio.clamp(1 - high, 1 + low)"),
        ("a block's share is dropped", "d_logits = share * torch.autograd", "d_logits = torch.autograd"),
        ("ratios at the clip bounds", "far = 0.4 + 0.2 * far", "far = 0.2 + 0.2 * far"),
        ("rounding of a vanishing row is its error", "size.clamp(min=0.2 * usual)", "size.clamp(min=0.0 * usual)"),
        ("the other ids of sets", "z.masked_fill(~kept[part]", "z.masked_fill(kept[part]"),
        ("no sequence without an advantage", "torch.where(active, size, 0.0)", "torch.where(active, size, size)"),
        ("overwritten logits are not restored", "self.logits.copy_(self.pristine)", "pass"),
    ),
    *of("benchmarks/measure.py", BENCHMARKS,
        ("NaN passes the check", "if not value <= most:", "if value > most:"),
        ("a limit ten times too wide", "most *= 2\n", "most *= 20\n"),
        ("torch.compile remembers shapes", "    torch._dynamo.reset()", "    pass"),
        ("a provider is timed however long a run takes", "if seconds > RUN_LIMIT_SECONDS:", "if False:"),
        ("estimates do not grow with the rows", 'seconds * cell.rows / other["rows"]', "seconds"),
        ("the slowest way of a part is the limit", 'min(names, key=lambda name: times[name]["ms"])', 'max(names, key=lambda name: times[name]["ms"])'),
    ),
    *of("benchmarks/harness.py", BENCHMARKS,
        ("the warm-up counts", "elif i > 0:", "elif i >= 0:"),
        ("contenders do not rotate", "first = i % max(1, len(names))", "first = 0"),
        ("L2 is not flushed", "_flush_buffer().zero_()", "pass"),
        ("freed memory stays with malloc", "    _trim()\n", ""),
    ),
    *of("benchmarks/providers/__init__.py", BENCHMARKS,
        ("a dtype that a provider does not take", "if cell.dtype not in self.dtypes:", "if cell.dtype is None:"),
        ("the sign of the cross-entropy", "return lambda: case.gradients(-target_logps().mean())", "return lambda: case.gradients(target_logps().mean())"),
    ),
    *of("benchmarks/providers/ours.py", BENCHMARKS, ("upstream 0.5 is 1", "value if upstream == 1 else upstream * value", "value")),
    *of("benchmarks/providers/limits.py", BENCHMARKS,
        ("one product is taken for another", "getattr(matmuls, part)(operand)", "matmuls.d_hidden(operand)"),
    ),
    *of("benchmarks/suites.py", BENCHMARKS,
        ("--fresh does nothing", "if not how.fresh:", "if True:"),
        ("a provider is left out for other code", 'f"{results.setting(here)}.json"', '"lost.json"'),
        ("cells are never found again", 'measured | {"fingerprint": mark}', 'measured | {"fingerprint": mark + "x"}'),
    ),
    *of("benchmarks/results.py", BENCHMARKS, ("figures of changed providers are kept", '"benchmarks/providers/*.py",', "")),
    *of("benchmarks/report.py", BENCHMARKS,
        ("5 % of noise break the promise", "standing.ratio * MOST_TIMES < 1", "standing.ratio < 1"),
        ("the eager backend keeps the promise", ' and "eager backend" not in row["name"]', ""),
        ("the weakest cell is hidden", '"smallest speed-up of all cells": all_standings[-1:]', '"smallest speed-up of all cells": all_standings[:1]'),
    ),
    *of("benchmarks/tables.py", BENCHMARKS, ("ratios are inverted", 'return row["ms"] / base["ms"]', 'return base["ms"] / row["ms"]')),
    *of("benchmarks/plots.py", BENCHMARKS, ("bars show another quantile", '_rounded(row["ms"]),', '_rounded(row["p80"]), ')),
    *of("benchmarks/machine.py", BENCHMARKS, ("AMX is no kind of its own", '{"amx_tile", "amx_bf16"}', '{"amx_tile", "amx_bf17"}')),
    *of("benchmarks/__main__.py", BENCHMARKS, ("a broken promise exits with 0", "if unmeasured or not kept:", "if unmeasured:")),
    *of("benchmarks/tune.py", KIT,
        ("noise replaces the package's setting", "> (1 + GAIN) * min", "> (1 + 0 * GAIN) * min"),
        ("a setting that failed is ranked", "for cell in timed)]", "for cell in timed[:1])]"),
        ("the CPU's chunk is changed", 'if key != "cpu":', "if True:"),
        ("a setting without room in shared memory", "copied_ahead(c) <= SHARED and ", ""),
    ),
    *of("benchmarks/gpu_kit.py", KIT,
        ("no time is kept for later stages", "deadline - time.monotonic() - kept)", "deadline - time.monotonic())"),
        ("children of a stage go on", "os.killpg(process.pid, signal.SIGKILL)", "process.kill()"),
        ("wheels are not installed on the next machine", "stage.name in AGAIN or stage.name", "stage.name"),
        ("a target is met from the other side", 'if self.sign == "<="', 'if self.sign == ">="'),
    ),
    *of("benchmarks/gpu_stages.py", KIT,
        ("a suite is not run again without its provider", "if status != LOST_DEVICE:", "if True:"),
        ("tests that were cut off too early pass", 'enough = 0 < group["first"] <= group["ran"]', 'enough = 0 < group["first"]'),
    ),
    *of("benchmarks/gpu_counters.py", KIT,
        ("bits of a replay are not compared", "if call.is_exact and not _all", "if not call.is_exact and not _all"),
        ("waits for events are not seen", "if not event.query():", "if event.query():"),
    ),
    # These come last, because the module of the copy stays faulty.
    *of("csrc/softmax_rows.h", COMBINATIONS,
        (
            "lanes behind a row's end count",
            'logits[0].z = select(first_lanes(count), logits[0].z, broadcast(-INFINITY));\n        update_shift',
            "update_shift", OBJECTIVES,
        ),
        ("a sign where the shift is raised", "factor * (sum_exp_shifted - by * sum_exp)", "factor * (sum_exp_shifted + by * sum_exp)", OBJECTIVES),
        ("squared exponentials are rescaled once", "    sum_exp_squared *= factor * factor;", "    sum_exp_squared *= factor;"),
        ("the coefficient of the entropy lacks the transform", "per_exp_shifted(c.logp * t.dz_dx / sum_exp)", "per_exp_shifted(c.logp / sum_exp)"),
        (
            "the entropy's gradient lacks its log-sum", "(c.constant - c.target - c.logp * log_sum_exp)",
            "(c.constant - c.target)", OBJECTIVES,
        ),
        (
            "the last elements are not scaled", 'for (; j < n; j++) {\n            T lanes[LANES];',
            'for (; j + 1 < n; j++) {\n            T lanes[LANES];',
        ),
        ("the largest id is where its block starts", "return int32_t(j + k);", "return int32_t(j);", SETS),
        (
            "the target's gradient lacks the softcap", "double(transform.dz_dx) * dtanh", "double(transform.dz_dx)",
        ),
        (
            "saved terms are all relative to the last shift",
            "exp(double(segment.shift) - double(polynomial.max_logit))", "1.0", HOSTILE,
        ),
        ("a widened row begins again at each block", "load_block<T, IDENTITY>(x + j, n", "load_block<T, IDENTITY>(x, n", HOSTILE),
    ),
    *of("csrc/divergence_rows.h", COMBINATIONS,
        (
            "a sign where both maxima are raised", "excess = other_factor * excess - of_log_ratio * log_ratio",
            "excess = other_factor * excess + of_log_ratio * log_ratio",
        ),
        (
            "the share of the policy is that of the reference", "(rows.direction == JSD ? 1.0 - rows.mixture : 1.0)",
            "(rows.direction == JSD ? rows.mixture : 1.0)",
        ),
        (
            "the two divergences of a mixture change places",
            "rows.mixture * reference + (1.0 - rows.mixture) * policy",
            "rows.mixture * policy + (1.0 - rows.mixture) * reference",
        ),
        (
            "the gradient of a total variation is not centered",
            "if (rows.direction == FORWARD) constant = 0.0;", "if (rows.direction % 2) constant = 0.0;",
        ),
    ),
    *of("csrc/kernels.cpp", LINEAR_PASS,
        (
            "a skipped token has the loss that its numbers give",
            "job.outputs[LOSSES][i] = 0;",
            "run_loss_program(job, i, 0, 0);",
        ),
    ),
    *of("csrc/pairs.h", COMBINATIONS,
        ("a partial sum is left out", "add(sum[r][2], sum[r][3])", "sum[r][2]"),
        (
            "a key starts from the sum of the one before",
            "starts = position >= job.count || pairs.key(position) != key;", "starts = position >= job.count;",
        ),
    ),
    *of("csrc/matmuls.cpp", COMBINATIONS,
        ("a block of ids forgets those before", "const float* start = block ? out : nullptr;", "const float* start = nullptr;"),
        (
            "every block of the width is the first", "job.hidden.at<Element>(begin, first)",
            "job.hidden.at<Element>(begin, 0)",
        ),
        (
            "every block of rows is the first", "block * BLOCK_PANEL_UNITS;", "0;", "tests/rows/test_cpu_products.py",
        ),
    ),
    *of("csrc/matmuls_amx.cpp", "tests/rows/test_cpu_products.py",
        (
            "a block of the width forgets those before", "if (has_blocks) add_strip_sums(sums, total, block == 0);",
            "if (has_blocks) add_strip_sums(sums, total, true);",
        ),
        (
            "a block of ids forgets those before", "add_strip_sums(sums, total, block == 0);\n                total",
            "add_strip_sums(sums, total, true);\n                total",
        ),
        (
            "every block of rows adds the sum before", "if (block == 0) {\n                        to.start",
            "if (true) {\n                        to.start",
        ),
        (
            "the element behind a row is written",
            "\n            _mm512_mask_storeu_ps(out + LANES, first16(second_columns), second);",
            "\n            _mm512_mask_storeu_ps(out + LANES, first16(second_columns + 1), second);",
        ),
        ("the last row of a strip is not stored", "r < min(to.rows, STRIP)", "r < min(to.rows, STRIP - 1)"),
        ("the low parts of the left operand are lost", "return tile == 2; }", "return false; }"),
    ),
    *of("grpo_kernels/core/backends/cpu_matmuls.py", "tests/rows/test_cpu_products.py",
        ("AMX is used without a comparison", 'difference = first_difference("amx", _best_without_amx())', "difference = None"),
        ("AMX is used without permission", "refusal = _cpu.request_amx_permission()", "refusal = 0 * _cpu.request_amx_permission()"),
        ("AMX is used where its registers are not saved", "if saved_state & TILE_STATE != TILE_STATE:", "if saved_state & TILE_STATE == 0:"),
        ("AMX with int8 only is taken for one with bf16", "AMX_BF16 | AMX_TILE\n", "AMX_TILE\n"),
        ("threads compare AMX at the same time", "    with _lock:\n        return _examine_amx()", "    return _examine_amx()"),
        ("a forked process waits for a thread that it does not have", "os.register_at_fork(after_in_child=_replace_lock)", "pass"),
        ("a mismatch is not warned of", "mismatch = amx_mismatch()", "mismatch = None"),
        ("AMX is asked for where another engine is named", 'if setting == "auto":', 'if engines() and setting == "auto":'),
        ("a comparison stops at the first product", "if difference is not None:\n                    return", "if True:\n                    return"),
        ("a comparison without memory ends the call", "except (MemoryError, RuntimeError)", "except RuntimeError"),
        ("sums of the comparison are rounded", "NARROW = 1\n", "NARROW = 3\n"),
        ("no operand of the comparison has low parts", "WIDE = 10\n", "WIDE = 7\n"),
        ("the comparison has no second part of the vocabulary", "(1, 1, 16385)", "(1, 1, 16384)"),
        ("the comparison has no second block of rows", "(513, 35, 59)", "(256, 35, 59)"),
        ("the comparison starts threads", "(DIVIDED - 1 - columns) // rows", "columns"),
        ("what is behind the end of a result is not compared", "torch.equal(result.memory, expected.memory)", "torch.equal(result.matrix, expected.matrix)"),
    ),
    *of("grpo_kernels/diagnosis/machine.py", "tests/diagnosis/test_doctor.py",
        ("wrong AMX products are no problem", "*amx_findings(), ", ""),
    ),
    *of("csrc/bind_matmuls.cpp", "tests/rows/test_cpu_products.py",
        ("permission is not asked for", "if (syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) != 0) return errno;", "return 0;"),
    ),
    *of("csrc/program.cpp", "tests/rows/test_evaluate.py",
        ("every block of a formula is the first", "std::copy_n(input + first, num_rows", "std::copy_n(input, num_rows"),
        ("every block of a formula is written to the first", "output_vectors[k] + first", "output_vectors[k]"),
    ),
    *of("grpo_kernels/core/backends/cpu.py", "tests/rows/test_evaluate.py",
        ("the inputs of a formula change places", '{"logps": logps, "entropy": entropy, **loss_formula', '{"logps": entropy, "entropy": logps, **loss_formula'),
    ),
    *of("csrc/program.cpp", "tests/formulas/test_program.py",
        ("a NaN is no minimum", 'return a < b || a != a ? a : b; }\nfloat maximum', 'return a < b ? a : b; }\nfloat maximum'),
    ),
    *of("csrc/arguments.h", "tests/rows/test_raw_pointers.py",
        ("a vector of another length is taken", 'require(count == num_rows, "count", count, "pass one value per row.");', ""),
        (
            "rows behind the last are taken",
            'require(end <= shape[0] * shape[1], "count", count, "the tensor has fewer rows.");', "",
        ),
    ),
    *of("csrc/processor.h", "tests/rows/test_raw_pointers.py",
        ("a limit of the instruction sets is not kept", "return Isa(isa);", "return best;"),
        ("an unknown instruction set limits nothing", "!name || !*name) return;", "true) return;"),
    ),
    *of("csrc/parallel.h", RELATIONS,
        ("a thread skips a range", "index = threads + num_taken.fetch_add", "index = threads + 1 + num_taken.fetch_add"),
    ),
    *of("grpo_kernels/segments.py", f"{EXTRA_IDS} {CANDIDATES}",
        ("sums are not in the order of the index", "sum_segments(sorted_grads, offsets)", "sum_segments(grad.double(), offsets)", EXTRA_IDS),
        ("the largest value gets no gradient", "        grad_of_largest = -sum_segments(grad_of_others, offsets)", "        grad_of_largest = 0.0 * sum_segments(grad_of_others, offsets)", CANDIDATES),
        ("the largest value beside a rest gets no gradient", "        grad_of_largest = grad_log_odds - sum_segments(grad_of_others, offsets)", "        grad_of_largest = 0.0 * grad_log_odds", EXTRA_IDS),
        ("the log-odds have no gradient at the likeliest id", "grad_of_largest = grad_log_odds - sum_segments(", "grad_of_largest = -sum_segments(", EXTRA_IDS),
        ("the log of a sum that is nearly 1 has no digits", "log_of_values = torch.log1p(sum_segments(other_exps, offsets))", "log_of_values = torch.log(1.0 + sum_segments(other_exps, offsets).float()).double()", EXTRA_IDS),
        ("a likely candidate loses the digits of 1 - p", "log_sums = torch.log1p(sum_segments(other_exps, offsets))", "log_sums = torch.log(1.0 + sum_segments(other_exps, offsets))", CANDIDATES),
        ("a value of -inf less -inf is NaN", "maxima.double().clamp(min=LOWEST_LOGP)", "maxima.double()"),
        ("log-probs of a segment of NaN are NaN", "return logps.nan_to_num_(nan=0.0, neginf=-torch.inf)", "return logps", CANDIDATES),
        ("NaN arrives where no gradient does", "is_replaced.logical_and(grad)", "is_replaced", CANDIDATES),
        ("no gradient arrives at rows of NaN", "return grad.masked_fill(has_gradient, torch.nan), None, None", "return grad.masked_fill(is_replaced, 0.0), None, None", CANDIDATES),
    ),
    *of("grpo_kernels/extra_ids.py", EXTRA_IDS,
        ("any pair is the target", "F.pad(pairs.token_ids, (0, 1))[positions]", "F.pad(pairs.token_ids, (0, 1))[rows.offsets[:-1]]"),
        ("the entropy lacks that of the rest", "(rest_values - rest_logps.clamp(min=LOWEST_LOGP))", "(-rest_logps.clamp(min=LOWEST_LOGP))"),
        ("equal pairs count twice", "masked_fill_(is_repeat, UNUSED_ID)", "masked_fill_(is_repeat & False, UNUSED_ID)"),
        ("a NaN beside the pairs is not seen", "(largest.maxima < torch.inf) & (log_odds == log_odds)", "(largest.maxima < torch.inf)"),
        ("the rest of a row without pairs is a part of it", "log_odds.masked_fill(largest.maxima == -torch.inf, -torch.inf)", "log_odds"),
        ("unused pairs have a gradient", "softmax.logps.masked_fill(pairs.token_ids < 0, -torch.inf)", "softmax.logps"),
        ("an id outside of the vocabulary has the log-prob -inf", "is_nan = is_outside | (", "is_nan = ("),
        ("a target of -1 is an unused pair", "torch.where(targets < 0, source.vocab_size, targets)", "targets"),
        ("masked rows have the log-prob -inf", "torch.where(row_mask[row_ids], result.logps, 0.0)", "result.logps"),
        ("masked tokens are read", "torch.where(is_used, pair_ids, UNUSED_ID),", "pair_ids,", UNREAD),
        ("pairs of masked rows are read", "token_ids = torch.where(mask[row_ids], token_ids, UNUSED_ID)", "pass", UNREAD),
        ("rows of masked tokens are processed", "marked_ids = torch.where(is_processed, row_ids, num_rows)", "marked_ids = row_ids"),
        ("masked tokens have the entropy of a row", "torch.where(is_processed, row_of_token.take(values), 0.0)", "row_of_token.take(values)"),
        ("0 times an infinite slope is NaN", "return times(grad_losses[token_of_id], grad_logps), None", "return grad_losses[token_of_id] * grad_logps, None"),
    ),
    *of("grpo_kernels/candidates.py", CANDIDATES,
        ("tokens of one row overwrite the gradients of each other", "shares_rows=rows is not None", "shares_rows=False"),
        ("a target never joins its set", "needs_logit=needs_logits & ~is_repeat", "needs_logit=needs_logits & ~is_repeat & entries.is_of_set"),
        ("the target is in its set twice", "is_repeat = entries.is_of_set & ~is_other", "is_repeat = entries.is_of_set & False"),
        ("a set of one id needs its logit", "has_several = has_candidates & (entries.segments.max(is_other.float()) > 0)", "has_several = has_candidates"),
        ("a missing target does not count as a candidate", "(entries.segments.max(is_other.float()) > 0)", "(candidates.counts > 1)"),
        ("rows of NaN look finite", "largest.maxima - largest.maxima == 0.0", "largest.maxima < torch.inf"),
        ("a target outside of the vocabulary is left out", "is_nan=plan.is_outside | ~is_finite", "is_nan=~is_finite"),
        ("the vocabulary is not asked for missing=\"full\"", 'candidates.empty_rows > 0 or missing == "full"', "candidates.empty_rows > 0"),
        ("the host waits for a GPU", 'may_use_vocabulary and targets.device.type == "cpu"', "may_use_vocabulary", UNREAD),
        ("rows that need the vocabulary are always asked for", "bool(uses_vocabulary.any())", "True"),
        ("top_id is the first of equal ids", "is_likeliest = softmax.largest.differences == 0.0", "is_likeliest = softmax.largest.is_largest"),
        ("an id outside of the set has a log-prob", "torch.where(is_candidate, softmax.logps[entry_of_key[places]], -torch.inf)", "softmax.logps[entry_of_key[places]]"),
        ("unused entries are candidates", "torch.where(plan.is_repeat, -1, entry_keys)", "entry_keys"),
        ("the kept mass is relative to the target", "- largest_logps(softmax, plan)\n", "- 0.0\n"),
        ("the reference's NaN is hidden", "policy_softmax.is_nan | reference_softmax.is_nan", "policy_softmax.is_nan"),
        ("the vocabulary's log-probs win", "torch.where(plan.uses_vocabulary, values, statistics[name])", "values"),
        ("extra ids of all tokens are over the set", "        token_uses_vocabulary,\n        over_vocabulary.extra_logps", "        ~token_uses_vocabulary & False,\n        over_vocabulary.extra_logps"),
    ),
    *of("grpo_kernels/teachers.py", TEACHERS,
        ("the probability outside is a sum in fp32", "1.0 - segments.sum(logps.exp())", "1.0 - segments.sum(logps.float().exp())"),
        ("an infinite divergence has a gradient of NaN", "is_replaced = ~values.isfinite()", "is_replaced = values.isnan()"),
        ("tokens without ids are processed", "has_ids if mask is None else mask & has_ids", "mask"),
        ("masked tokens have a divergence", "divergence if mask is None else torch.where(mask, divergence, 0.0)", "divergence"),
        ("weights pass as probabilities", "mass > LARGEST_MASS).any()", "mass > 9.0).any()"),
    ),
    *of("grpo_kernels/draft_heads.py", DRAFT_HEADS,
        ("the policy's position is one behind", "distances = [depth + 1 for depth", "distances = [depth + 2 for depth"),
        ("the token is one before", "distance = depth + 2", "distance = depth + 1"),
        ("targets are taken from the next sequence", "both_real & same_sequence", "both_real"),
        ("padding at the left counts", "self.is_real[:-distance] & self.is_real[distance:]", "self.is_real[distance:]"),
        ("the loss lacks the policy's entropy", "sums.divergence + policy.entropy", "sums.divergence"),
        ("rows that do not count overwrite row 0", "positions.index_add_(0, row_ids, values)", "positions.index_copy_(0, row_ids, values)"),
        ("the upstream gradient is left out", "unit_gradient * upstream", "unit_gradient"),
        ("gradients are computed without need", "torch.is_grad_enabled() and x.requires_grad for", "True for"),
        ("the head of hard losses is trained", "head = Head(detached(inputs.weight), detached(inputs.bias))", "head = Head(inputs.weight, inputs.bias)"),
        ("draft and policy share the memory of their logits", "replace(projection, weight=policy_matmuls.weight).make_matmuls()", "policy_matmuls"),
        ("depths have the normalizer of the first", "(losses.flatten(1).sum(1) / denominator)", "(losses.flatten(1).sum(1) / denominator.flatten()[0] if normalizer is None else losses.flatten(1).sum(1) / denominator)"),
        ("a chunk has the logits of one side", "max_rows = memory.plan(device_type, max(num_rows, 1)).chunk", "max_rows = max(num_rows, 1)"),
    ),
    *of("grpo_kernels/training/draft.py", TRAINER_DRAFT,
        ("the draft draws from the random numbers of the run", "with torch.random.fork_rng(devices):", "if devices is not None:"),
        ("the draft gets the token that it stands at", "(completions.ids[:, 1:])", "(completions.ids[:, :-1])"),
        ("gradients are sums over positions", "            gradient /= count\n", "            pass\n"),
        ("padding is trained on", "mask=completions.attention[:, :-1]", "mask=None"),
        ("the optimizer's state is not restored", "self.optimizer.load_state_dict(state[\"optimizer\"])", "pass"),
    ),
    *of("grpo_kernels/trees.py", EXTRA_IDS,
        ("all tokens are processed", "        no_extra_ids,\n        mask=mask,", "        no_extra_ids,\n        mask=None,"),
    ),
    *of("grpo_kernels/core/linear.py", PRODUCTS,
        (
            "a bias of its own is not looked at",
            "same_weight and same_bias and self",
            "same_weight and self",
        ),
        (
            "the backward on a GPU takes rows without a gradient",
            "row_ids = self.row_ids[: self.num_with_gradient]\n        return",
            "row_ids = self.row_ids\n        return",
            LINEAR_PASS,
        ),
        (
            "rows in another order are taken as they lie",
            "return is_complete and self.num_with_gradient in (0, num_processed)",
            "return is_complete",
            LINEAR_PASS,
        ),
        (
            "targets are not in the order of the rows",
            "return x if self.is_identity else x.index_select(0, self.row_ids)",
            "return x",
        ),
        (
            "temperatures are not in the order of the rows",
            "return transform if self.is_identity else transform.select(self.row_ids)",
            "return transform",
            LINEAR_PASS,
        ),
        (
            "hidden states are those of the first rows",
            "return x.index_select(0, rows_of(self.row_ids, chunk))",
            "return rows_of(x, chunk)",
        ),
        (
            "values stay in the order of the pass",
            "table.index_copy_(1, self.order.row_ids, values)",
            "table.copy_(torch.cat([values, table[:, values.shape[1] :]], 1))",
        ),
        (
            "logits of policy and reference change places",
            "logits, reference_logits = both.tensor_split",
            "reference_logits, logits = both.tensor_split",
            LINEAR_PASS,
        ),
        (
            "a reference's hidden states are those of the first rows",
            "self.order.gather_chunk(reference.projection.hidden.detach(), chunk)",
            "reference.projection.hidden.detach()[chunk]",
        ),
        (
            "a reference's temperatures are those of the first rows",
            "reference.projection.transform.select(self.order.row_ids_at(chunk))",
            "reference.projection.transform.select(chunk)",
            LINEAR_PASS,
        ),
        (
            "rows in no block have any gradient",
            "self.grad_hidden = torch.zeros(",
            "self.grad_hidden = torch.empty(",
        ),
        (
            "the gradient of hidden states has no row_scale",
            "scale_rows(matmuls.grad_hidden(grad_logits), row_scale)",
            "matmuls.grad_hidden(grad_logits)",
        ),
        (
            "the gradient of the weight has no row_scale",
            "hidden=scale_rows(hidden, row_scale)",
            "hidden=hidden",
        ),
        ("each block is rounded", "is_last and self.may_round_weight", "self.may_round_weight", BLOCKS),
        (
            "a sum for memory of the caller is rounded",
            "is_last and self.may_round_weight",
            "is_last",
            COST,
        ),
        (
            "the bias's gradient is that of the last chunk",
            "self.grad_bias += ",
            "self.grad_bias = ",
            BLOCKS,
        ),
        (
            "a row_scale of 0 times infinity is NaN",
            ".masked_fill_(scale == 0, 0.0)",
            "",
            LINEAR_PASS,
        ),
        (
            "an fp16 gradient of hidden states underflows before the loss scale",
            "torch.float32 if hidden_dtype == torch.float16 else hidden_dtype",
            "hidden_dtype",
            AUTOGRAD,
        ),
        (
            "rows without a gradient have no log-probs",
            'others = slice(num_with_gradient, order.row_ids.shape[0])',
            'others = slice(0, 0)',
        ),
        (
            "the last block is not rounded",
            'is_last = chunks is plan.blocks[-1]',
            'is_last = False',
            BLOCKS,
        ),
        (
            "a log-prob of NaN has a gradient before its factor",
            "(logps == logps).float()",
            "torch.ones_like(logps)",
            LINEAR_PASS,
        ),
        (
            "values are in the order of processing",
            "in sorted(self.chunks, key=lambda chunk: chunk[0])",
            "in self.chunks",
            LINEAR_PASS,
        ),
        ("sums of another row", "self.sums = sums.select(order.row_ids)", "self.sums = sums"),
        (
            "coefficients of another row",
            "self.coefficients = coefficients.select(order.row_ids)",
            "self.coefficients = coefficients",
        ),
        (
            "an even slice has no remainder",
            "start + smaller + (1 if i < remainder else 0)",
            "start + smaller",
        ),
        (
            "a sequence is longer than a block",
            "if num_rows > max_rows:\n            return None",
            "if False:\n            return None",
        ),
        (
            "a block of sequences is longer than it may be",
            "if stop + num_rows - start > max_rows:",
            "if num_rows > max_rows:",
            BLOCKS,
        ),
        (
            "the last sequences are in no block",
            "if stop > start:\n        blocks",
            "if False:\n        blocks",
        ),
        (
            "rows at another distance are the same head",
            "x.dtype == y.dtype and x.shape == y.shape and x.stride() == y.stride()",
            "x.dtype == y.dtype and x.shape == y.shape",
            LINEAR_PASS,
        ),
        (
            "autocast rounds logits",
            "if torch.is_autocast_enabled(device_type):\n        return torch.autocast",
            "if False:\n        return torch.autocast",
            LINEAR_PASS,
        ),
        (
            "rows without a gradient are processed after those with one",
            (
                '        for chunk in plan.chunks_without_gradient:\n            formula.process_chunk(chunk, logits.compute(chunk, logits.policy_hidden(chunk)), None)\n        for chunks in plan.blocks:\n            block = slice(chunks[0].start, chunks[-1].stop)\n            hidden = logits.policy_hidden(block)\n            grad_logits = gradient_of_block(chunks, hidden, formula, logits, accumulator)\n            is_last = chunks is plan.blocks[-1]\n            accumulator.add_block(block, hidden, grad_logits, formula.row_scale(block), is_last)\n            del hidden, grad_logits  # before the next block allocates its own\n'
            ),
            (
                '        for chunks in plan.blocks:\n            block = slice(chunks[0].start, chunks[-1].stop)\n            hidden = logits.policy_hidden(block)\n            grad_logits = gradient_of_block(chunks, hidden, formula, logits, accumulator)\n            is_last = chunks is plan.blocks[-1]\n            accumulator.add_block(block, hidden, grad_logits, formula.row_scale(block), is_last)\n            del hidden, grad_logits  # before the next block allocates its own\n        for chunk in plan.chunks_without_gradient:\n            formula.process_chunk(chunk, logits.compute(chunk, logits.policy_hidden(chunk)), None)\n'
            ),
            LINEAR_PASS,
        ),
        (
            "heads of two matmul dtypes are one",
            "same_bias and self.matmul_dtype == other.matmul_dtype",
            "same_bias",
            LINEAR_PASS,
        ),
    ),
    *of("grpo_kernels/core/autograd.py", AUTOGRAD,
        (
            "a constant statistic has a gradient",
            'return name == "logps" or (name in DIFFERENTIABLE and name not in self.detached)',
            'return name == "logps" or name in DIFFERENTIABLE',
            PRODUCTS,
        ),
        (
            "a reference that was written to is not noticed",
            "if versions_of(row_pass.tensors_read_again()) != ctx.versions:",
            "if False:",
            SETS,
        ),
        (
            "16-bit memory takes the sum of blocks",
            "self.total if self.total.dtype == torch.float32 else None",
            "self.total",
            COST,
        ),
        (
            "memory is added to itself",
            "if gradient is not None and gradient is not self.total:",
            "if gradient is not None:",
        ),
        ("Megatron's flag is not set", "weight.grad_added_to_main_grad = True", "pass"),
        (
            "a placeholder is added to shared memory",
            "return zeros(weight.shape, weight.dtype, weight.device)\n        return",
            (
                "return torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)\n"
                "        return"
            ),
        ),
        (
            "a weight that is gone is not noticed",
            "is_empty = weight.untyped_storage().nbytes() == 0",
            "is_empty = False",
            LINEAR_PASS,
        ),
        (
            "a gradient is handed over twice",
            "self.gradients = None\n        results: list[Tensor | None] = []",
            "results: list[Tensor | None] = []",
        ),
        (
            "a gradient that was written to is handed over",
            "if gradient.value is not None and gradient.value._version != version:",
            "if False:",
        ),
        ("the factor of the loss is dropped", "self.kernels.scale_(result, grad_loss)", "pass"),
        (
            "a loss has a second derivative",
            "if torch.is_grad_enabled():\n            # In a backward",
            "if False:\n            # In a backward",
        ),
        
        
        
        
        (
            "the gradient of a loss of statistics has no factor",
            "None if x is None else x * grad_loss for x",
            "None if x is None else x for x",
        ),
        (
            "a rank without columns has no weight",
            "is_empty = shard is None",
            "is_empty = True",
            RANKS,
        ),
        (
            "the gradient of hidden states is this rank's",
            "return ctx.shard.sum_over_ranks(grad_hidden.contiguous()), None",
            "return grad_hidden, None",
            RANKS,
        ),
    ),
    *of("grpo_kernels/core/loss_formulas.py", PRODUCTS,
        (
            "losses of an earlier block are those of all rows",
            "self._losses = None\n        if grad_logits",
            "if grad_logits",
            "tests/core/test_linear_pass.py",
        ),
        (
            "inputs of a loss are not in the order of the rows",
            "loss_formula if order.is_identity else loss_formula.select(order.row_ids)",
            "loss_formula",
        ),
        (
            "a log-prob of NaN has a gradient that nothing arrives at",
            (
                "is_nan = self.logps.isnan() & (grad_logps != 0)\n"
                "        return self.order"
            ),
            "is_nan = self.logps.isnan()\n        return self.order",
            LINEAR_PASS,
        ),
        ("row_scale is not in the order of the rows", "self.order.gather_chunk(grad_logps.masked_fill(is_nan, torch.nan), block)", "grad_logps.masked_fill(is_nan, torch.nan)[block]"),
        (
            "the sum of losses is fp32",
            "losses.sum(dtype=torch.float64).float()",
            "losses.sum()",
            RELATIONS,
        ),
    ),
    *of("grpo_kernels/core/pairs.py", COMBINATIONS,
        (
            "the pairs of a row belong to the row before",
            "torch.searchsorted(row_ids, bounds)",
            "torch.searchsorted(row_ids, bounds, right=True)",
        ),
    ),
    *of("grpo_kernels/core/rest_of_rows.py", EXTRA_IDS,
        ("ids that are left out are in the sums", "copy.index_fill_(0, elements, -torch.inf)", "pass"),
        ("ids that are left out get a gradient", "fill_pairs(out, rows.first_row + left_out.positions, left_out.columns, 0.0)", "pass"),
        ("the target has no logit if it is left out", 'sums["target_logit"].copy_(target_logits(rows))', "pass"),
        (
            "rows of a chunk are taken for others",
            "if rows.batch_rows is not None:", "if False:", LISTED,
        ),
    ),
    *of("grpo_kernels/core/pair_logits.py", COMBINATIONS,
        (
            "a pair of no id writes to the first logit",
            "values = values.masked_fill(columns < 0, 0.0).to(out.dtype)",
            "values = values.to(out.dtype)",
            LINEAR_PASS,
        ),
        (
            "logits of pairs get no gradient",
            "out.view(-1).index_add_(0, elements, values)",
            "pass",
        ),
        (
            "pairs have no bias",
            "logits = logits + bias.detach().float()[pairs.ids.clamp(min=0)]",
            "pass",
        ),
        (
            "the bias gets nothing from pairs",
            "kernels.add_grad_weight_of_pairs(pair_grads, pairs, ones, fp32_grad_bias)",
            "pass",
        ),
        (
            "hidden states get nothing from pairs",
            "kernels.write_grad_hidden_of_pairs(pair_grads, pairs, weight.detach(), fp32_grad_hidden)",
            "pass",
        ),
        (
            "the placeholder of pairs is the memory",
            "total if weight_memory is None else weight_memory.add(total)",
            "total",
            AUTOGRAD,
        ),
        (
            "ids of a rank count from 0",
            "columns = token_ids - shard.start",
            "pass",
            RANKS,
        ),
        (
            "logits of pairs are this rank's",
            "return shard.sum_over_ranks(logits)",
            "return logits",
            RANKS,
        ),
    ),
    *of("grpo_kernels/core/sources.py", LINEAR_PASS,
        (
            "an id outside of the vocabulary has the logit 0",
            "return transformed.masked_fill(is_outside, -torch.inf)",
            "return transformed",
        ),
        (
            "the version of logits that a backward overwrites stays",
            "if self.inplace:\n            torch.autograd.graph.increment_version(logits)",
            "if False:\n            pass",
            AUTOGRAD,
        ),
        (
            "the rows of another mask are processed",
            "self.known_order is not None and self.known_order.is_for(mask):",
            "self.known_order is not None:",
            PRODUCTS,
        ),
        (
            "a gradient of the entropy is left out with a frozen head",
            " and not has_other_gradient", "",
            PRODUCTS,
        ),
        (
            "the scale of fp16 rows is fixed before their factor",
            "if memory.has_grad_buffer and memory.scales_rows:",
            "if False:",
            BLOCKS,
        ),
        (
            "a block of sequences is planned without the copies of its rows",
            "gathers_rows(self.projection, num_rows)",
            "False",
            BLOCKS,
        ),
        (
            "rows without a gradient are in the backward",
            "order = RowOrder.of_mask(coefficients.nonzero, self.order.num_rows, weight.device)",
            "order = self.order",
            PRODUCTS,
        ),
        (
            "a reference's hidden states that were written to are not noticed",
            "tensors += [projection.hidden, projection.weight, projection.bias]",
            "pass",
        ),
        (
            "targets that were written to are not noticed",
            "tensors = [self.targets, self.mask, temperatures_of(self.source.transform)]",
            "tensors = [None]",
        ),
        (
            "what arrives at masked rows of a frozen head is used",
            'masked_grad(grads["logps"], self.rows_with_gradient())',
            'grads["logps"].float()',
        ),
        (
            "a log-prob of NaN of a frozen head has no gradient",
            "grad_logps = grad_logps.masked_fill(is_nan, torch.nan)\n        grad_hidden",
            "grad_hidden",
        ),
        (
            "a row without an upstream gradient is 0 times infinity",
            "grad_hidden.masked_fill_((grad_logps == 0)[:, None], 0.0)",
            "pass",
        ),
        (
            "the upstream gradient of a frozen head is dropped",
            "grad_hidden = unit_gradient * grad_logps[:, None]",
            "grad_hidden = unit_gradient * 1.0",
        ),
        (
            "the unit gradient of a frozen head is rounded",
            "            grad_hidden_dtype=torch.float32,\n        )\n        assert",
            "        )\n        assert",
        ),
        (
            "a pass for 16-bit memory sums in it",
            "weight_total=None if memory is None else memory.fp32_total",
            "weight_total=None if memory is None else memory.total",
            COST,
        ),
        
        (
            "a backward without rows gives the weight none",
            "elif weight_wanted and grad_weight is None:",
            "elif False:",
            COMBINATIONS,
        ),
    ),
    *of("grpo_kernels/core/compiled.py", COMPILE,
        (
            "scale and softcap change places",
            "scale=transform.scale,\n            softcap=transform.softcap,",
            "scale=transform.softcap,\n            softcap=transform.scale,",
        ),
        (
            "rows of a temperature each have that of none",
            "inverse_temperature = options.inv_temperatures",
            "pass",
        ),
        (
            "a frozen tensor has the gradient of the next",
            "next(results) if needed else None for",
            "next(results, None) for",
        ),
        (
            "a fake gradient for each tensor",
            "zip(tensors, wanted, strict=True) if needed]",
            "zip(tensors, wanted, strict=True) if x is not None]",
        ),
        ("targets in a graph are not checked", "check_targets(targets, mask, vocab_size)", "pass"),
        (
            "masked rows are in the matmuls of a graph",
            "order=RowOrder.of_mask(mask, len(hidden), hidden.device)",
            "order=RowOrder.of_all_rows(len(hidden), hidden.device)",
        ),
    ),
    *of("grpo_kernels/inputs.py", REFUSALS,
        ("a temperature for each token of a shared row", "if self.are_shared:", "if False:"),
        
        
        (
            "the matmuls of autocast are those of hidden states",
            "if torch.is_autocast_enabled(device_type):\n        return torch.get",
            "if False:\n        return torch.get",
            LINEAR_PASS,
        ),
        (
            "hidden states of other rows are taken",
            "if hidden.dim() != len(shape) + 1 or hidden.shape[:-1] != shape:",
            "if hidden.dim() != len(shape) + 1:",
        ),
        (
            "a bias of another length is taken",
            "if bias is not None and bias.shape != (vocab_size,):",
            "if False:",
        ),
        (
            "a dtype without matmuls is taken",
            "if not isinstance(x, Tensor) or x.dtype not in MATMUL_DTYPES:",
            "if not isinstance(x, Tensor):",
        ),
        ("memory for a frozen head", "if not weight.requires_grad:", "if False:"),
        (
            "memory for a gathered weight",
            'if hasattr(weight, "ds_id") or is_managed(weight):',
            "if False:",
        ),
        (
            "other memory sets Megatron's flag",
            "weight if is_main_grad and has_flag else None",
            "weight if has_flag else None",
            AUTOGRAD,
        ),
        (
            "a reference of another vocabulary is taken",
            "if (source.vocab_size, source.num_columns) != (policy.vocab_size, policy.num_columns):",
            "if False:",
        ),
        (
            "several references are taken for one",
            'require(not isinstance(value, list), name, "list", remedy)',
            "pass",
        ),
        (
            "a reference's logits have the policy's transform",
            "transform = as_transform(value[1])",
            "pass",
            LINEAR_PASS,
        ),
        
        (
            "a bias beside a Head is dropped",
            "if isinstance(weight, Head) and bias:",
            "if False:",
            COMPOSED,
        ),
        
        (
            "hidden states are summed whatever is asked",
            "if shard is not None and shard.reduce_hidden and hidden.requires_grad:",
            "if shard is not None and hidden.requires_grad:",
            RANKS,
        ),
    ),
    *of("grpo_kernels/options.py", HEAD,
        
    ),
    *of("grpo_kernels/losses.py", PRODUCTS,
        
        
        (
            "tokens that cannot contribute are processed",
            (
                "tokens = objective.token_inputs(batch, normalizer, options.skip_inactive)\n"
                "    refuse_nan"
            ),
            "tokens = objective.token_inputs(batch, normalizer, False)\n    refuse_nan",
            LINEAR_PASS,
        ),
        
        (
            "on a GPU rows without a gradient are not processed",
            'num_processed = batch.count_in_mask("trained", tokens.processed)',
            "pass",
            WAITS,
        ),
        
        
        
        
        
        
        
        
        
        (
            "a loss of extra ids has no gradient",
            "            token_losses.grad_auxiliary_loss,",
            "            None,",
            LISTED,
        ),
        (
            "a divergence is not in the loss",
            "loss = loss + sum_losses(times(tokens.divergence_weight, divergence))",
            "pass",
            COMBINATIONS,
        ),
        (
            "an infinite divergence of a weight of 0",
            "times(tokens.divergence_weight, divergence)",
            "tokens.divergence_weight * divergence",
            COMPOSED,
        ),
        (
            "statistics of masked tokens are used",
            "return x if mask is None else torch.where(mask, x, 0.0)",
            "return x",
            COMPOSED,
        ),
        (
            "the square of the temperature divides a divergence's weight",
            "tokens.divergence_weight / factor",
            "tokens.divergence_weight * factor",
            COMBINATIONS,
        ),
        (
            "an entropy that a filter needs may be missing",
            "if entropy is None and (objective.needs_entropy or filters_entropy):",
            "if entropy is None and objective.needs_entropy:",
            COMPOSED,
        ),
        (
            "a reference's log-probs are not used",
            "batch = batch.with_ref_logps(ref_logps)",
            "pass",
            SETS,
        ),
    ),
    *of("grpo_kernels/logprobs.py", COMPOSED,
        (
            "temperatures of masked rows are squared",
            "inverse = torch.where(mask, inverse, 1.0)",
            "pass",
            REFUSALS,
        ),
        
        (
            "a set of a divergence is not checked",
            'check_sets("kept", kept, no_targets, source.vocab_size)',
            "pass",
        ),
        (
            "a composed entropy that is detached has a gradient",
            "name: x.detach() if name in detached else x for",
            "name: x for",
        ),
        
        (
            "a statistic is asked for twice",
            "is_valid = is_known and len(set(also)) == len(also)",
            "is_valid = is_known",
        ),
        (
            "missing=None includes a target in strict mode",
            'missing or ("raise" if is_strict(options.strict) else "include")',
            'missing or "include"',
        ),
    ),
    *of("grpo_kernels/loss_output.py", OBJECTIVES,
        ("ess without weights", "weight = ratio * rows.weights", "pass"),
        (
            "masked tokens count as zero advantages",
            "trained & (rows.advantages == 0)",
            "rows.advantages == 0",
        ),
    ),
    *of("grpo_kernels/divergences.py", COMBINATIONS,
        ("masked tokens use the vocabulary", "uses_vocabulary = uses_vocabulary & mask", "pass"),
        (
            "tokens without candidates have no divergence",
            "return torch.where(uses_vocabulary, over_vocabulary, over_candidates)",
            "return over_candidates",
        ),
        (
            "tokens that share a row have the divergence of another",
            "row_statistics, row_ids, is_processed",
            "row_statistics, torch.arange(len(rows)) % num_rows, is_processed",
        ),
    ),
    *of("grpo_kernels/core/linear_memory.py", BLOCKS,
        (
            "earlier blocks leave nothing",
            "sum_of_earlier_blocks = grad_weight_sum if has_several_blocks else 0",
            "sum_of_earlier_blocks = 0",
        ),
    ),
    *of("grpo_kernels/core/matmuls.py", BLOCKS,
        (
            "a rank without ids has one chunk a block",
            "return MatmulsWithoutIds(weight, bias)",
            "return HeadMatmuls(weight, bias)",
            "tests/core/test_ranks.py",
        ),
        (
            "the sum of the blocks before is dropped",
            "cpu_matmuls.grad_weight(grad_logits, hidden, total, out)",
            "cpu_matmuls.grad_weight(grad_logits, hidden, None, out)",
            PRODUCTS,
        ),
        (
            "the sum is rounded with every block",
            "self.rounded_dtype if may_round else torch.float32\n        out = total",
            "self.rounded_dtype\n        out = total",
            COST,
        ),
        ("chunks of a block overwrite each other", "self.num_filled += len(grad_logits)", "pass"),
        ("exponents of fp16 rows are lost", "self.exponents[chunk] = exponents", "pass"),
        (
            "rows of fp16 have one scale in the weight's gradient",
            "hidden = torch.mul(hidden, row_scale[:, None], out=torch.empty_like(hidden))",
            "pass",
        ),
    ),
]
# fmt: on


def run(fault: Fault, copy: Path, everything: bool) -> bool:
    """Whether a test fails."""
    path = copy / fault.file
    text = path.read_text()
    assert text.count(fault.old) == 1, (
        f"{fault.what}: {fault.file} has this text {text.count(fault.old)} times"
    )
    path.write_text(text.replace(fault.old, fault.new))
    try:
        if fault.file.startswith("csrc"):
            subprocess.run(
                ["cmake", "--build", str(copy / "build" / "faults"), "-j2"],
                check=True,
                capture_output=True,
            )
            for module in (copy / "build" / "faults").glob("_cpu*.so"):
                shutil.copy(module, copy / "grpo_kernels")
        tests = [] if everything else fault.tests.split()
        command = [
            copy / ".venv" / "bin" / "python",
            "-m",
            "pytest",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            *tests,
        ]
        env = {**os.environ, "PYTHONPATH": str(copy)}
        return (
            subprocess.run(command, cwd=copy, env=env, capture_output=True, timeout=1800).returncode
            == 1
        )
    finally:
        path.write_text(text)


def project(folder: Path) -> Path:
    """A copy of the project with the compiled module, and a Python of its own: one that has all packages but this project, which
    may be installed in such a way that it is imported in place of the copy."""
    copy = folder / "project"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv", "build", "dist"))
    module = importlib.util.find_spec("grpo_kernels._cpu")
    if module is not None and module.origin is not None:
        shutil.copy(module.origin, copy / "grpo_kernels")
    venv.create(copy / ".venv", with_pip=False, symlinks=True)
    (packages,) = (copy / ".venv" / "lib").glob("*/site-packages")
    (packages / "all.pth").write_text(
        "\n".join(path for path in sys.path if path.endswith("-packages"))
    )
    subprocess.run(
        [copy / ".venv" / "bin" / "python", "-c", "import pytest, torch"], check=True
    )  # without them each fault is "found"
    return copy


def main(words: list[str]) -> None:
    everything, words = "--all" in words, [word for word in words if word != "--all"]
    chosen = [
        f for f in FAULTS if not words or any(word in f.what or word in f.file for word in words)
    ]
    missed = []
    with tempfile.TemporaryDirectory() as folder:
        copy = project(Path(folder))
        if any(f.file.startswith("csrc") for f in chosen):
            subprocess.run(
                [
                    "cmake",
                    "-S",
                    str(copy),
                    "-B",
                    str(copy / "build" / "faults"),
                    f"-DPython_EXECUTABLE={sys.executable}",
                ],
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
