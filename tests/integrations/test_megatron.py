"""Output processors of megatron-core on stand-ins, on 1, 2 and 4 ranks: values and gradients
against plain PyTorch in float64 on whole rows, the rows that take part in matmuls, and memory.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from itertools import product
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from grpo_kernels import Objective, Options, TokenBatch
from grpo_kernels.formulas.surrogates import Clip
from grpo_kernels.integrations import megatron, nemo_rl
from grpo_kernels.integrations.megatron import LogprobsContext, LossContext
from support.inside import Allocations, blocks, count_products
from support.megatron import (
    GPTModel,
    HybridModel,
    VisionLanguageModel,
    Wrapper,
)
from support.processes import checks_of

MODULE = "test_megatron"
B, S, H = 3, 8, 6
PADDED = 24  # rows of the output weight
VOCAB = 17  # ids: the last of 4 ranks has padding alone, that of 2 ranks both

G = torch.Generator().manual_seed(11)
WEIGHT = torch.randn(PADDED, H, generator=G)
TRUNK_INPUT = torch.randn(S, B, H, generator=G)
LABELS = torch.randint(VOCAB, (B, S), generator=G)
LOSS_MASK = (torch.rand(B, S, generator=G) < 0.6).float()
LOSS_MASK[1] = 0.0
OLD = -2.5 + 0.5 * torch.randn(B, S, generator=G)
REF = -2.5 + 0.5 * torch.randn(B, S, generator=G)
ADVANTAGES = torch.tensor([1.3, -0.8, 0.9])
UPSTREAM = torch.randn(2, B, S, generator=G).double()
TEMPERATURES = 0.5 + torch.rand(B, S, generator=G)
OFFSETS = torch.tensor([0, 3, 4, 8])  # three packed sequences

TOKEN_LEVEL = Objective(Clip(0.2, 0.3), beta=0.1, entropy_coef=0.02)
SEQUENCE_LEVEL = Objective(Clip(0.2, 0.3), level="sequence", aggregate="seq-mean-token-mean")


@dataclass(frozen=True)
class Case:
    """One call of a model.

    kind     "log-probs" or "loss"
    packed   whether one row of tokens holds three sequences
    """

    kind: str = "log-probs"
    sequence_parallel: bool = False
    tied: bool = False
    masked: bool = True
    padded: bool = True
    packed: bool = False
    scale: float = 1.0
    temperature: float | str = 0.7
    objective: Objective = TOKEN_LEVEL

    @property
    def vocab_size(self):
        return VOCAB if self.padded else PADDED

    @property
    def sequences(self):
        return slice(0, 1) if self.packed else slice(0, B)

    @property
    def labels(self):
        return LABELS[self.sequences]

    @property
    def mask(self):
        mask = LOSS_MASK[self.sequences]
        return mask if self.masked else torch.ones_like(mask)

    @property
    def temperatures(self):
        if self.temperature == "per token":
            return TEMPERATURES[self.sequences]
        return self.temperature

    @property
    def advantages(self):
        """float64 [B, S]."""
        if self.packed:
            return ADVANTAGES.double().repeat_interleave(OFFSETS.diff())[None]
        return ADVANTAGES.double()[:, None].expand(B, S)


#: Every pair of values that may affect each other, and each kind.
CASES = [
    *(
        Case(kind, sequence_parallel, tied, masked, padded)
        for kind, sequence_parallel, tied, masked, padded in product(
            ("log-probs", "loss"), *[(False, True)] * 4
        )
    ),
    *(
        Case(kind, sequence_parallel, packed=True, temperature=temperature, scale=0.25)
        for kind, sequence_parallel, temperature in product(
            ("log-probs", "loss"), (False, True), (1.3, "per token")
        )
    ),
    *(
        Case("loss", sequence_parallel, packed=packed, objective=SEQUENCE_LEVEL)
        for sequence_parallel, packed in product((False, True), (False, True))
    ),
]


# ---- in float64, on whole rows


def expected(case):
    """(log-probs, entropy, loss, gradient of the trunk's input [S, B, H], gradient of WEIGHT)."""
    weight = WEIGHT.double().requires_grad_()
    trunk_input = TRUNK_INPUT[:, case.sequences].double().requires_grad_()
    hidden = trunk_input.tanh().transpose(0, 1)
    temperature = torch.as_tensor(case.temperatures, dtype=torch.float64)
    if temperature.dim():
        temperature = temperature[..., None]
    logits = hidden @ weight[: case.vocab_size].T * case.scale / temperature
    log_p = logits.log_softmax(-1)
    mask = case.mask.double()
    logps = log_p.gather(-1, case.labels[..., None])[..., 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    loss = loss_of(case, logps, entropy)
    logps = mask * logps
    entropy = mask * entropy
    if case.kind == "log-probs":
        total = (UPSTREAM[0, case.sequences] * logps + UPSTREAM[1, case.sequences] * entropy).sum()
    else:
        total = loss
    total.backward()
    return SimpleNamespace(
        log_probs=logps.detach(),
        entropy=entropy.detach(),
        loss=loss.detach(),
        grad_input=trunk_input.grad,
        grad_weight=weight.grad,
    )


def loss_of(case, logps, entropy):
    """The loss of TOKEN_LEVEL or SEQUENCE_LEVEL, written out."""
    mask = case.mask.double()
    log_ratio = mask * (logps - OLD[case.sequences])
    if case.objective is SEQUENCE_LEVEL:
        sequences = case.sequence_of_token()
        counts = (sequences @ mask.flatten()).clamp(min=1)
        means = sequences @ log_ratio.flatten() / counts
        surrogate = clipped(sequences.T @ means, case.advantages.flatten())
        return (sequences @ (mask.flatten() * surrogate) / counts).sum() / len(sequences)
    surrogate = clipped(log_ratio, case.advantages)
    x = REF[case.sequences] - logps
    kl = x.exp() - x - 1
    terms = surrogate + 0.1 * kl - 0.02 * entropy
    return (mask * terms).sum() / mask.sum().clamp(min=1)


def clipped(log_ratio, advantages):
    ratio = log_ratio.exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.3) * advantages)


def sequence_of_token(case):
    """float64 [num_sequences, num_tokens]: 1 where the token belongs to the sequence."""
    lengths = OFFSETS.diff() if case.packed else torch.full((B,), S)
    ids = torch.arange(len(lengths)).repeat_interleave(lengths)
    return (ids == torch.arange(len(lengths))[:, None]).double()


Case.sequence_of_token = sequence_of_token


# ---- the stand-ins on a rank


def groups_of(ranks_of_a_group):
    """The group of this rank among consecutive ranks."""
    world = dist.get_world_size()
    groups = [
        dist.new_group(list(range(first, first + ranks_of_a_group)))
        for first in range(0, world, ranks_of_a_group)
    ]
    return groups[dist.get_rank() // ranks_of_a_group]


def part(x, group, dim=0):
    """The part of x that this rank of a group has."""
    if group is None:
        return x.clone()
    return x.chunk(dist.get_world_size(group), dim)[dist.get_rank(group)].clone()


def model_of(case, group=None, kind=GPTModel, **config):
    config |= {"use_mup": case.scale != 1.0, "mup_output_mult": case.scale}
    return kind(
        part(WEIGHT, group),
        group,
        tied=case.tied,
        sequence_parallel=case.sequence_parallel,
        **config,
    )


def batch_of(case):
    fields = {
        "targets": case.labels,
        "mask": case.mask != 0,
        "old_logps": OLD[case.sequences],
        "ref_logps": REF[case.sequences],
    }
    advantages = ADVANTAGES[:, None]
    if case.packed:
        fields = {name: x[0] for name, x in fields.items()}
        fields["cu_seqlens"] = OFFSETS
    return TokenBatch(advantages=advantages, **fields)


def call_of(case, model, trunk_input, run=megatron.run_with_processor, vocab_size=None):
    """The model's output for a case."""
    vocab_size = case.vocab_size if vocab_size is None else vocab_size
    if case.kind == "log-probs":
        processor = megatron.logprobs_processor
        context = LogprobsContext(case.temperatures, vocab_size)
    else:
        temperatures = case.temperatures
        if case.packed and isinstance(temperatures, torch.Tensor):
            temperatures = temperatures[0]
        processor = megatron.loss_processor
        context = LossContext(batch_of(case), case.objective, temperatures, vocab_size)
    return run(
        model,
        processor,
        context,
        input_ids=None,
        position_ids=None,
        attention_mask=None,
        decoder_input=trunk_input,
        labels=case.labels,
        loss_mask=case.mask if case.masked else None,
    )


def compare_case(case, group=None, kind=GPTModel, wrap=lambda model: model):
    """A case on the ranks of a group against float64."""
    model = model_of(case, group, kind)
    trunk_input = TRUNK_INPUT[:, case.sequences]
    if case.sequence_parallel:
        trunk_input = part(trunk_input, group)
    trunk_input = trunk_input.clone().requires_grad_()
    out = call_of(case, wrap(model), trunk_input)
    want = expected(case)
    if case.kind == "log-probs":
        assert out.logits is None and out.hidden_states.shape == trunk_input.shape
        near(out.log_probs, want.log_probs, case)
        near(out.entropy, want.entropy, case)
        upstream = UPSTREAM[:, case.sequences].float()
        (upstream[0] * out.log_probs + upstream[1] * out.entropy).sum().backward()
    else:
        near(out.loss, want.loss, case)
        out.loss.backward()
    grad_input = want.grad_input
    if case.sequence_parallel:
        grad_input = part(grad_input, group)
    near(trunk_input.grad, grad_input, case)
    near(model.head.grad, part(want.grad_weight, group), case)


def near(found, want, case, tolerance=2e-5):
    assert found.shape == want.shape, (found.shape, want.shape, case)
    difference = (found.double() - want).abs().max()
    assert difference <= tolerance * (1 + want.abs().max()), (difference, case)


# ---- checks on ranks


def check_every_case(rank, ranks):
    """With all ranks as one tensor-parallel group; on 4 ranks, every third case."""
    for case in CASES[:: ranks - 1]:
        compare_case(case, dist.group.WORLD)


def check_model_without_the_hook(rank, ranks):
    for kind in ("log-probs", "loss"):
        for sequence_parallel in (False, True):
            compare_case(Case(kind, sequence_parallel), dist.group.WORLD, HybridModel)


def check_context_parallel_ranks(rank, ranks):
    """Each rank has two pieces of every sequence, the first and the last of its order, and on 4
    ranks half of the vocabulary.
    """
    tensor_ranks = ranks // 2
    group = groups_of(tensor_ranks)
    context_groups = [
        dist.new_group([first, first + tensor_ranks]) for first in range(tensor_ranks)
    ]
    context_group = context_groups[rank % tensor_ranks]
    context_rank = rank // tensor_ranks
    rows = zigzag(context_rank, 2)
    for kind, sequence_parallel, objective in product(
        ("log-probs", "loss"), (False, True), (TOKEN_LEVEL, SEQUENCE_LEVEL)
    ):
        compare_on_context_ranks(
            Case(kind, sequence_parallel, objective=objective), rows, group, context_group
        )


def zigzag(context_rank, context_ranks):
    """The positions of a sequence that a context-parallel rank has."""
    pieces = torch.arange(S).chunk(2 * context_ranks)
    return torch.cat([pieces[context_rank], pieces[2 * context_ranks - 1 - context_rank]])


def compare_on_context_ranks(case, rows, group, context_group):
    model = model_of(case, group)
    # The sequences are packed: [B * S / 2] positions of this rank, in the order of sequences.
    trunk_input = TRUNK_INPUT[rows].transpose(0, 1).reshape(-1, 1, H)
    if case.sequence_parallel:
        trunk_input = part(trunk_input, group)
    trunk_input = trunk_input.clone().requires_grad_()
    params = SimpleNamespace(cu_seqlens_q=None, cu_seqlens_q_padded=torch.arange(B + 1) * S)
    batch = TokenBatch(
        LABELS[:, rows].flatten(),
        ADVANTAGES[:, None],
        mask=LOSS_MASK[:, rows].flatten() != 0,
        old_logps=OLD[:, rows].flatten(),
        ref_logps=REF[:, rows].flatten(),
        cu_seqlens=megatron.packed_offsets(params, context_ranks=2),
        context_group=context_group,
    )
    normalizer = float(LOSS_MASK.sum()) if case.objective is TOKEN_LEVEL else float(B)
    want = expected(case)
    inputs = {
        "input_ids": None,
        "position_ids": None,
        "attention_mask": None,
        "decoder_input": trunk_input,
    }
    if case.kind == "log-probs":
        out = megatron.run_with_processor(
            model,
            megatron.logprobs_processor,
            LogprobsContext(0.7, VOCAB),
            labels=batch.targets[None],
            loss_mask=batch.mask[None].float(),
            **inputs,
        )
        near(out.log_probs, want.log_probs[:, rows].reshape(1, -1), case)
        upstream = UPSTREAM[:, :, rows].float().reshape(2, 1, -1)
        (upstream[0] * out.log_probs + upstream[1] * out.entropy).sum().backward()
    else:
        context = LossContext(batch, case.objective, 0.7, VOCAB, normalizer)
        out = megatron.run_with_processor(model, megatron.loss_processor, context, **inputs)
        out.loss.backward()
        total = out.loss.detach().clone()
        dist.all_reduce(total, group=context_group)
        near(total, want.loss, case)
    grad_input = want.grad_input[rows].transpose(0, 1).reshape(-1, 1, H)
    if case.sequence_parallel:
        grad_input = part(grad_input, group)
    near(trunk_input.grad, grad_input, case)
    grad_weight = model.head.grad
    dist.all_reduce(grad_weight, group=context_group)
    near(grad_weight, part(want.grad_weight, group), case)


def check_nemo_rls_function(rank, ranks):
    """Log-probs of the next tokens from parts of the sequence."""
    group = dist.group.WORLD
    weight = part(WEIGHT, group).requires_grad_()
    hidden = part(TRUNK_INPUT, group).requires_grad_()
    whole_weight = WEIGHT.double().requires_grad_()
    whole_hidden = TRUNK_INPUT.double().requires_grad_()
    log_p = (whole_hidden.transpose(0, 1) @ whole_weight.T).log_softmax(-1)
    want = log_p[:, :-1].gather(-1, LABELS[:, 1:, None])[..., 0]
    (UPSTREAM[0, :, 1:] * want).sum().backward()
    start = rank * len(weight)
    found = nemo_rl.from_parallel_hidden_states_to_logprobs(
        hidden, weight, False, LABELS, start, start + len(weight), group
    )
    (UPSTREAM[0, :, 1:].float() * found).sum().backward()
    near(found, want, "log-probs")
    near(hidden.grad, part(whole_hidden.grad, group), "hidden")
    near(weight.grad, part(whole_weight.grad, group), "weight")


def check_main_grad(rank, ranks):
    """Two micro-batches add up in main_grad. The hook that reduces gradients finds the flag of
    Megatron's own layers and, for tied weights, a gradient of 0 to add.
    """
    for kind, tied in product(("log-probs", "loss"), (False, True)):
        case = Case(kind, True, tied)
        group = dist.group.WORLD
        model = model_of(case, group, gradient_accumulation_fusion=True)
        weight = model.head
        weight.main_grad = torch.ones_like(weight)
        weight.grad_added_to_main_grad = False
        weight.zero_out_wgrad = tied
        for _ in range(2):
            trunk_input = part(TRUNK_INPUT, group).requires_grad_()
            out = call_of(case, model, trunk_input)
            if kind == "loss":
                out.loss.backward()
            else:
                upstream = UPSTREAM.float()
                (upstream[0] * out.log_probs + upstream[1] * out.entropy).sum().backward()
            assert weight.grad_added_to_main_grad
            assert not tied or not weight.grad.any()
            weight.grad = None
            weight.grad_added_to_main_grad = False
        near(weight.main_grad - 1, 2 * part(expected(case).grad_weight, group), case)


def check_the_gradient_of_hidden_states_is_summed_once(rank, ranks):
    """One all-reduce of [S, B, H] without sequence parallelism; one gather and one reduce-scatter
    with it, and no all-reduce.
    """
    for kind, sequence_parallel in product(("log-probs", "loss"), (False, True)):
        case = Case(kind, sequence_parallel)
        calls = []
        with pytest.MonkeyPatch.context() as patch:
            for name in ("all_reduce", "reduce_scatter_tensor", "all_gather_into_tensor"):
                patch.setattr(dist, name, recorded(calls, name))
            compare_case(case, dist.group.WORLD)
        sizes = [(name, size) for name, size in calls if size >= S * B * H]
        if sequence_parallel:
            assert sizes == [
                ("all_gather_into_tensor", S * B * H),
                ("reduce_scatter_tensor", S * B * H),
            ], (case, sizes)
        else:
            masked_rows = int(LOSS_MASK.sum()) * H
            sums = [size for name, size in calls if name == "all_reduce"]
            assert [size for size in sums if size >= masked_rows] == [S * B * H], (case, calls)


def recorded(calls, name):
    """A collective that notes its name and the larger size of its two tensors."""
    own = getattr(dist, name)

    @functools.wraps(own)
    def call(*tensors, **options):
        calls.append((name, max(x.numel() for x in tensors if isinstance(x, torch.Tensor))))
        return own(*tensors, **options)

    return call


def check_memory(rank, ranks):
    """No tensor of [S, V / ranks], nor of a fifth of it; masked rows take part in no matmul."""
    length, vocab, width = 1536, 512, 4
    weight = torch.randn(vocab // ranks, width)
    hidden = torch.randn(length // ranks, 1, width)
    labels = torch.randint(vocab, (1, length), generator=torch.Generator().manual_seed(3))
    mask = torch.ones(1, length)
    mask[:, :100] = 0
    for kind, backend in product(("log-probs", "loss"), ("eager", "auto")):
        model = GPTModel(weight.clone(), dist.group.WORLD, sequence_parallel=True)
        trunk_input = hidden.clone().requires_grad_()
        options = Options(backend)
        with pytest.MonkeyPatch.context() as patch, Allocations() as seen:
            for table in (blocks.CHUNK_BYTES, blocks.IN_PLACE_CHUNK_BYTES):
                patch.setitem(table, "cpu", 1)  # the least number of rows in a chunk
            rows = count_products(patch)
            if kind == "log-probs":
                processor = megatron.logprobs_processor
                context = LogprobsContext(options=options)
            else:
                processor = megatron.loss_processor
                batch = TokenBatch(labels, torch.ones(1, 1), mask=mask != 0)
                context = LossContext(batch, TOKEN_LEVEL_NO_KL, options=options)
            out = model(
                None,
                None,
                None,
                trunk_input,
                labels,
                loss_mask=mask,
                output_processor=processor,
                output_processor_context=context,
            )
            if kind == "log-probs":
                (out.log_probs + out.entropy).sum().backward()
            else:
                out.loss.backward()
        largest = max(torch.Size(shape).numel() for shape in seen.shapes)
        assert largest * 5 <= length * vocab // ranks, (kind, backend, largest)
        assert rows["d_hidden"] == rows["d_weight"] == length - 100, (kind, backend, rows)


TOKEN_LEVEL_NO_KL = replace(TOKEN_LEVEL, beta=0.0)


@pytest.mark.parametrize("check", checks_of(__name__))
@pytest.mark.parametrize("ranks", [2, 4])
def test_on_ranks(on_ranks, check, ranks):
    found = on_ranks(MODULE, ranks)[check]
    assert found == "ok", found


# ---- on one rank


@pytest.mark.parametrize("kind", ["log-probs", "loss"])
@pytest.mark.parametrize("packed", [False, True])
def test_one_rank(kind, packed):
    compare_case(Case(kind, sequence_parallel=False, packed=packed, scale=0.5))
    compare_case(Case(kind, sequence_parallel=False, packed=packed, padded=False, tied=True))


WRAPPERS = {
    "twice": lambda model: Wrapper(Wrapper(model)),
    "multimodal": lambda model: Wrapper(VisionLanguageModel(model)),
}


@pytest.mark.parametrize("kind", [GPTModel, HybridModel])
@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_wrapped_models(kind, wrap):
    compare_case(Case(), kind=kind, wrap=wrap)
    compare_case(Case("loss"), kind=kind, wrap=wrap)


@pytest.mark.parametrize("kind", [GPTModel, HybridModel])
def test_other_pipeline_stages_return_hidden_states(kind):
    model = model_of(Case(), kind=kind)
    model.post_process = False
    hidden = call_of(Case(), model, TRUNK_INPUT)
    assert torch.equal(hidden, TRUNK_INPUT.tanh())
    assert not model.post_process


@pytest.mark.parametrize("kind", [GPTModel, HybridModel])
def test_an_installed_processor(kind):
    """A trainer that does not know the hook calls the model; the context changes between calls."""
    case = Case(masked=False)
    model = model_of(case, kind=kind)
    inputs = (None, None, None, TRUNK_INPUT, LABELS)
    want = expected(case)
    with megatron.install_processor(Wrapper(model), megatron.logprobs_processor) as installed:
        with pytest.raises(RuntimeError, match="has a processor already"):
            megatron.install_processor(model, megatron.logprobs_processor)
        installed.context = LogprobsContext(0.7, VOCAB)
        near(Wrapper(model)(*inputs).log_probs, want.log_probs, case)
        installed.context = LogprobsContext(0.7, VOCAB, LOSS_MASK != 0, entropy=False)
        out = model(*inputs)
        near(out.log_probs, want.log_probs * LOSS_MASK, case)
        assert out.entropy is None
    assert model.post_process and "forward" not in vars(model)
    installed.remove()
    with pytest.raises(AssertionError, match="the output layer was called"):
        model(*inputs)


@pytest.mark.parametrize("kind", [GPTModel, HybridModel])
def test_a_hook_for_a_model_without_one(kind):
    case = Case()
    model = model_of(case, kind=kind)
    remove = megatron.add_hook(Wrapper(model))
    inputs = {"decoder_input": TRUNK_INPUT, "labels": LABELS, "loss_mask": LOSS_MASK}
    out = Wrapper(model)(
        None,
        None,
        None,
        output_processor=megatron.logprobs_processor,
        output_processor_context=LogprobsContext(0.7, VOCAB),
        **inputs,
    )
    near(out.log_probs, expected(case).log_probs, case)
    near(out.entropy, expected(case).entropy, case)
    with pytest.raises(AssertionError, match="the output layer was called"):
        model(None, None, None, **inputs)
    remove()
    assert "forward" not in vars(model) and model.post_process


def test_a_processor_gets_the_arguments_of_the_model():
    seen = []
    inputs = {
        "input_ids": LABELS,
        "position_ids": LABELS + 1,
        "attention_mask": None,
        "decoder_input": TRUNK_INPUT,
        "labels": LABELS,
        "loss_mask": LOSS_MASK,
        "packed_seq_params": SimpleNamespace(),
        "runtime_gather_output": False,
    }
    for kind in (GPTModel, HybridModel):
        model = model_of(Case(tied=True), kind=kind)
        megatron.run_with_processor(model, lambda **given: seen.append(given), "context", **inputs)
        given = seen[-1]
        assert all(given[name] is inputs[name] for name in inputs)
        assert given["output_weight"] is model.head and given["context"] == "context"
        assert given["output_layer"] is model.output_layer and given["config"] is model.config
    assert seen[0].keys() == seen[1].keys()


def test_a_processor_is_removed_after_an_error():
    model = model_of(Case(), kind=HybridModel)
    with pytest.raises(ValueError, match="labels is None"):
        megatron.run_with_processor(
            model,
            megatron.logprobs_processor,
            LogprobsContext(),
            input_ids=None,
            position_ids=None,
            attention_mask=None,
            decoder_input=TRUNK_INPUT,
        )
    assert model.post_process and "forward" not in vars(model)
    assert "forward" not in vars(model.output_layer)


def test_multi_token_prediction_needs_the_hook():
    model = model_of(Case(), kind=HybridModel, mtp_num_layers=1)
    model.mtp_process = True
    inputs = (None, None, None, TRUNK_INPUT, LABELS)
    with megatron.install_processor(model, megatron.logprobs_processor, LogprobsContext()):
        with pytest.raises(ValueError, match="Pass compute_mtp_loss=False"):
            model(*inputs)
        assert model(*inputs, compute_mtp_loss=False).log_probs.shape == LABELS.shape


@pytest.mark.parametrize("kind", ["log-probs", "loss"])
def test_hooks_of_the_output_layer_run_before_its_weight_is_read(kind):
    """DistributedDataParallel with overlap_param_gather fills in the weight in such a hook."""
    case = Case(kind)
    model = model_of(case)
    values = model.head.detach().clone()
    model.head.data.fill_(torch.nan)

    def fill_in(layer, inputs):
        model.head.data.copy_(values)

    model.output_layer.register_forward_pre_hook(fill_in)
    out = call_of(case, model, TRUNK_INPUT)
    if kind == "loss":
        near(out.loss, expected(case).loss, case)
    else:
        near(out.log_probs, expected(case).log_probs, case)


def test_a_bias_of_the_output_layer():
    model = model_of(Case())
    bias = torch.randn(PADDED)
    model.output_layer.bias = torch.nn.Parameter(bias)
    out = call_of(Case(), model, TRUNK_INPUT)
    hidden = TRUNK_INPUT.double().tanh().transpose(0, 1)
    logits = (hidden @ WEIGHT[:VOCAB].double().T + bias[:VOCAB].double()) / 0.7
    logps = logits.log_softmax(-1).gather(-1, LABELS[..., None])[..., 0]
    near(out.log_probs, logps * LOSS_MASK, Case())
    model.output_layer.skip_bias_add = True
    out = call_of(Case(), model, TRUNK_INPUT)
    near(out.log_probs, expected(Case()).log_probs, Case())


def test_log_probs_that_a_loss_function_computes_later():
    model = model_of(Case())
    logits = megatron.run_with_processor(
        model,
        megatron.head_processor,
        LogprobsContext(vocab_size=VOCAB),
        input_ids=None,
        position_ids=None,
        attention_mask=None,
        decoder_input=TRUNK_INPUT,
    )
    assert logits.size(1) == S and logits.device == TRUNK_INPUT.device
    found = logits.logprobs(LABELS, mask=LOSS_MASK != 0, temperature=0.7, entropy=True)
    near(found.logps, expected(Case()).log_probs, Case())
    near(found.entropy, expected(Case()).entropy, Case())
    near(logits.sum(), TRUNK_INPUT.double().tanh().sum(), Case())


def test_a_context_with_a_temperature_alone():
    """As verl passes it: padding ids count, as in verl."""
    case = Case(padded=False)
    model = model_of(case)
    context = SimpleNamespace(temperature=0.7)
    inputs = (None, None, None, TRUNK_INPUT, LABELS)
    hook = {
        "output_processor": megatron.logprobs_processor,
        "output_processor_context": context,
    }
    out = model(*inputs, loss_mask=LOSS_MASK, **hook)
    near(out.log_probs, expected(case).log_probs, case)
    near(out.entropy, expected(case).entropy, case)


def arguments_of(model, **changes):
    """The arguments of the hook."""
    given = {
        "hidden_states": TRUNK_INPUT,
        "output_layer": model.output_layer,
        "output_weight": None,
        "labels": LABELS,
        "context": LogprobsContext(),
        "config": model.config,
        "scale_logits": model._scale_logits,
    }
    return given | changes


class Lora(torch.nn.Module):
    """An adapter that shows the weight of the layer that it wraps."""

    def __init__(self):
        super().__init__()
        self.to_wrap = torch.nn.Linear(H, PADDED)
        self.tp_group = None

    @property
    def weight(self):
        return self.to_wrap.weight


REFUSED = {
    "labels is None": {"labels": None},
    "output_layer is a Lora": {"output_layer": Lora()},
    "output_layer is a SimpleNamespace": {"output_layer": SimpleNamespace()},
    "scale_logits does more than multiply": {"scale_logits": lambda x: 30 * (x / 30).tanh()},
    "vocab_size=25": {"context": LogprobsContext(vocab_size=25)},
    "vocab_size=0": {"context": LogprobsContext(vocab_size=0)},
    "labels has": {"labels": LABELS[:, :-1]},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_refused(message):
    model = model_of(Case())
    with pytest.raises(ValueError, match=message):
        megatron.logprobs_processor(**arguments_of(model, **REFUSED[message]))


def test_what_the_loss_refuses():
    model = model_of(Case("loss"))
    packed = LossContext(batch_of(Case("loss", packed=True)), TOKEN_LEVEL)
    for context, message in (
        (LogprobsContext(), "pass a LossContext"),
        (packed, r"hidden states \[S, 1, H\]"),
    ):
        with pytest.raises(ValueError, match=message):
            megatron.loss_processor(**arguments_of(model, context=context))
    model.output_layer.gtp_remat_size = 2
    with pytest.raises(ValueError, match="gtp_remat_size=2"):
        megatron.logprobs_processor(**arguments_of(model))
    with pytest.raises(ValueError, match="pass a GPTModel"):
        megatron.install_processor(torch.nn.Linear(2, 2), megatron.logprobs_processor)


def test_offsets_of_packed_sequences():
    params = SimpleNamespace(cu_seqlens_q=torch.tensor([0, 8, 12]), cu_seqlens_q_padded=None)
    assert megatron.packed_offsets(params).tolist() == [0, 8, 12]
    assert megatron.packed_offsets(params, context_ranks=4).tolist() == [0, 2, 3]
    with pytest.raises(ValueError, match="pad each sequence"):
        megatron.packed_offsets(params, context_ranks=3)
