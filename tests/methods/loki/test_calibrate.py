"""Principal directions, beside those of known distributions."""

from __future__ import annotations

import torch

from longreach.methods.loki.calibrate import moments, principal, together


def keys(count: int, *, seed: int = 0, mean: float = 0.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[n, G, D] keys whose directions [G, D, D] and variances [G, D] are known."""
    draw = torch.Generator().manual_seed(seed)
    turn = torch.linalg.qr(torch.randn(3, 8, 8, dtype=torch.float64, generator=draw))[0]
    variance = torch.tensor([100.0, 25.0, 9.0, 1.0, 0.5, 0.2, 0.1, 0.01], dtype=torch.float64).expand(3, -1)
    x = torch.randn(count, 3, 8, dtype=torch.float64, generator=draw) * variance.sqrt()
    offset = torch.randn(3, 8, generator=draw, dtype=torch.float64) * mean
    return torch.einsum("ngi,gdi->ngd", x, turn) + offset, turn, variance


def test_known_directions_are_found_by_falling_variance() -> None:
    for mean in (0.0, 50.0):
        k, turn, variance = keys(20000, mean=mean)
        basis, found = principal(moments(k))
        assert basis.shape == (3, 8, 8) and found.shape == (3, 8)
        torch.testing.assert_close(found, variance, rtol=0.1, atol=0)
        same = torch.einsum("gdi,gdi->gi", basis, turn).abs()
        assert bool((same > 0.99).all()), "up to their signs"
        torch.testing.assert_close(basis.mT @ basis, torch.eye(8, dtype=torch.float64).expand(3, -1, -1))


def test_it_is_the_covariances_decomposition() -> None:
    k, _, _ = keys(50, seed=3, mean=2.0)
    basis, variance = principal(moments(k))
    for head in range(3):
        want = torch.cov(k[:, head].T, correction=0)
        torch.testing.assert_close((basis[head] * variance[head]) @ basis[head].T, want)
        at = basis[head].abs().argmax(0)
        assert bool((basis[head].gather(0, at[None]) > 0).all()), "a direction's largest part is positive"


def test_every_key_counts_alike_however_texts_are_cut() -> None:
    k, _, _ = keys(100, seed=5)
    whole = moments(k)
    parts = together([moments(part.float()) for part in k.float().double().split([7, 60, 33])])
    assert parts.keys == whole.keys == 100
    torch.testing.assert_close(parts.mean, whole.mean, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(parts.product, whole.product, rtol=1e-5, atol=1e-5)


def test_keys_that_are_all_the_same_have_no_variance() -> None:
    basis, variance = principal(moments(torch.ones(9, 1, 4)))
    assert float(variance.abs().max()) < 1e-12
    torch.testing.assert_close(basis.mT @ basis, torch.eye(4, dtype=torch.float64)[None])
