"""Layer 1 under autograd: unused outputs, second backwards, in-place gradients, frozen inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from grpo_kernels import LogitTransform, token_logprobs
from support.cases import DTYPES, same_bits, snapshot
from support.logprob_cases import ALL, ours, random_rows, reference

Tensor = torch.Tensor


# ---- autograd


def test_entropy_options(backend: str) -> None:
    logits, targets, d_logps, d_entropy = random_rows(6, 50)
    with_gradient = ours(logits, targets, d_logps, d_entropy, backend)
    leaf = logits.clone().requires_grad_()
    logps, nothing = token_logprobs(leaf, targets, backend=backend)
    assert nothing is None and same_bits(logps.detach(), with_gradient[0])
    logps, value = token_logprobs(leaf, targets, entropy="detached", backend=backend)
    assert value is not None and with_gradient[1] is not None and not value.requires_grad and same_bits(value, with_gradient[1])
    logps.backward(d_logps)
    assert leaf.grad is not None and same_bits(leaf.grad, ours(logits, targets, d_logps, None, backend)[2])


def test_unused_outputs(backend: str) -> None:
    """Entropy that is asked for and not used changes nothing; entropy used alone has its own gradient."""
    logits, targets, d_logps, d_entropy = random_rows(6, 50)
    only_logps = ours(logits, targets, d_logps, None, backend, entropy=True)
    assert same_bits(only_logps[2], ours(logits, targets, d_logps, None, backend)[2])
    leaf = logits.clone().requires_grad_()
    _, entropy = token_logprobs(leaf, targets, entropy=True, backend=backend)
    assert entropy is not None
    entropy.backward(d_entropy)
    exact = reference(logits, targets, None, d_entropy, torch.float64)
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad.double(), exact[2], rtol=1e-4, atol=1e-6)


def test_rows_without_upstream_gradient_are_zero(backend: str) -> None:
    logits, targets, d_logps, d_entropy = random_rows(6, 50)
    d_logps[2:4], d_entropy[2:4] = 0.0, 0.0
    _, _, gradient = ours(logits, targets, d_logps, d_entropy, backend)
    assert not gradient[2:4].any() and gradient[:2].any(1).all() and gradient[4:].any(1).all()


def test_second_backward_and_accumulation(backend: str) -> None:
    logits, targets, d_logps, d_entropy = random_rows(6, 50)
    leaf = logits.clone().requires_grad_()
    logps, entropy = token_logprobs(leaf, targets, entropy=True, backend=backend)
    (first,) = torch.autograd.grad([logps, entropy], leaf, [d_logps, d_entropy], retain_graph=True)
    (second,) = torch.autograd.grad([logps, entropy], leaf, [d_logps, d_entropy])
    assert same_bits(first, second)
    with pytest.raises(RuntimeError):
        torch.autograd.grad(logps, leaf, d_logps)


def test_double_backward_is_refused(backend: str) -> None:
    logits, targets, _, _ = random_rows(3, 20)
    leaf = logits.clone().requires_grad_()
    logps, _ = token_logprobs(leaf, targets, backend=backend)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(logps.square().sum(), leaf, create_graph=True)


def test_checkpointing(backend: str) -> None:
    from torch.utils.checkpoint import checkpoint

    logits, targets, d_logps, _ = random_rows(6, 50)
    expected = ours(logits, targets, d_logps, None, backend)[2]
    leaf = logits.clone().requires_grad_()
    logps = checkpoint(lambda x: token_logprobs(x, targets, backend=backend)[0], leaf, use_reentrant=False)
    logps.backward(d_logps)
    assert leaf.grad is not None and same_bits(leaf.grad, expected)


def test_frozen_no_grad_and_inference_mode(backend: str) -> None:
    logits, targets, _, _ = random_rows(6, 50)
    expected = token_logprobs(logits, targets, entropy=True, backend=backend)
    assert not any(x.requires_grad for x in expected if x is not None)
    leaf = logits.clone().requires_grad_()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            got = token_logprobs(leaf, targets, entropy=True, backend=backend)
            for x, y in zip(got, expected, strict=True):
                assert x is not None and y is not None and not x.requires_grad and same_bits(x, y)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_inputs_are_not_modified(dtype: torch.dtype, backend: str) -> None:
    logits, targets, d_logps, d_entropy = random_rows(6, 50, dtype)
    mask, temperature = torch.rand(6) < 0.7, torch.full((6,), 0.8)
    leaf = logits.requires_grad_()
    tensors = {
        "logits": leaf,
        "targets": targets,
        "mask": mask,
        "temperature": temperature,
        "d_logps": d_logps,
        "d_entropy": d_entropy,
    }
    check = snapshot(**tensors)
    logps, entropy = token_logprobs(
        leaf, targets, mask=mask, transform=LogitTransform(temperature=temperature), entropy=True, backend=backend
    )
    torch.autograd.backward([logps, entropy], [d_logps, d_entropy])
    check()
    assert all(x._version == 0 for x in tensors.values())


@pytest.mark.parametrize("transform", [{}, ALL], ids=["plain", "all"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_inplace_is_the_same_gradient_in_the_logits_memory(dtype: torch.dtype, transform: dict[str, Any], backend: str) -> None:
    logits, targets, d_logps, d_entropy = random_rows(8, 1031, dtype)
    expected = ours(logits, targets, d_logps, d_entropy, backend, transform=transform)
    leaf = logits.clone().requires_grad_()
    source = leaf * 1.0
    address, version = source.data_ptr(), source._version
    seen: list[int] = []
    source.register_hook(lambda g: seen.append(g.data_ptr()))
    logps, entropy = token_logprobs(
        source, targets, transform=LogitTransform(**transform), entropy=True, inplace=True, backend=backend
    )
    assert same_bits(source.detach(), logits) and source._version == version  # the forward leaves them alone
    torch.autograd.backward([logps, entropy], [d_logps, d_entropy])
    assert leaf.grad is not None and entropy is not None and expected[1] is not None
    assert (
        same_bits(leaf.grad, expected[2])
        and same_bits(logps.detach(), expected[0])
        and same_bits(entropy.detach(), expected[1])
    )
    assert seen == [address] and source._version > version


def test_overwritten_logits_cannot_be_trained_on(backend: str) -> None:
    """A second head on the same logits works out of place and raises, instead of using garbage, in place."""
    logits, targets, d_logps, _ = random_rows(6, 50)
    for inplace in (False, True):
        leaf = logits.clone().requires_grad_()
        source = leaf * 1.0
        other = source.square().sum()
        logps, _ = token_logprobs(source, targets, inplace=inplace, backend=backend)
        torch.autograd.grad(logps, source, d_logps, retain_graph=True)
        if inplace:
            for second in (other, logps.sum()):
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    second.backward()
        else:
            other.backward()
            assert leaf.grad is not None and same_bits(leaf.grad, 2 * logits)


def test_two_heads_on_the_same_logits(backend: str) -> None:
    logits, targets, d_logps, d_entropy = random_rows(6, 50)
    a = ours(logits, targets, d_logps, None, backend)[2]
    b = ours(logits, targets, d_entropy, None, backend, transform={"temperature": 0.5})[2]
    leaf = logits.clone().requires_grad_()
    first, _ = token_logprobs(leaf, targets, backend=backend)
    second, _ = token_logprobs(leaf, targets, transform=LogitTransform(temperature=0.5), backend=backend)
    (first @ d_logps + second @ d_entropy).backward()
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad, a + b, rtol=1e-6, atol=1e-7)


def test_fp16_upstream_with_a_loss_scale(backend: str) -> None:
    """Tiny per-token gradients times 2^16 survive the rounding to fp16."""
    logits, targets, d_logps, _ = random_rows(8, 300, torch.float16)
    upstream = d_logps * 1e-6 * 2.0**16
    exact = reference(logits, targets, upstream, None, torch.float64)
    _, _, gradient = ours(logits, targets, upstream, None, backend)
    relevant = exact[2].abs() > 1e-4
    assert relevant.sum() > 50
    torch.testing.assert_close(gradient.double()[relevant], exact[2][relevant], rtol=1e-3, atol=0)


@pytest.mark.parametrize("grad", [False, True])
def test_forward_mode_is_refused(grad: bool) -> None:
    """Also where no gradient is asked for, so that the log-probs are computed without an autograd Function."""
    logits, targets = torch.randn(3, 7), torch.tensor([1, 2, 3])
    with torch.set_grad_enabled(grad), torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(logits, torch.randn(3, 7))
        with pytest.raises(NotImplementedError, match="jvp"):
            token_logprobs(dual, targets)
