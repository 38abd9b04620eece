"""`tilegrad.fft` against torch.fft: pairs are torch.view_as_real; values, gradients, edges."""

from __future__ import annotations

import numpy as np
import pytest
from torch_tables import torch

import tilegrad as tg

RANDOM = np.random.default_rng(5)
NORMS = (None, "ortho", "forward")


def theirs(name, array, complex_in, **options):
    """What torch gives, complex numbers as pairs."""
    x = torch.tensor(array, requires_grad=True)
    given = torch.view_as_complex(x) if complex_in else x
    found = getattr(torch.fft, name)(given, **options)
    return x, torch.view_as_real(found.resolve_conj()) if found.is_complex() else found


def check(cases, tolerance=1e-11):
    """Values and gradients of (name, array, is complex, options), read together."""
    rows, total = [], 0.0
    for name, array, complex_in, options in cases:
        x = tg.tensor(array).requires_grad_()
        found = getattr(tg.fft, name)(x, **options)
        peer, wanted = theirs(name, array, complex_in, **options)
        weights = RANDOM.standard_normal(tuple(wanted.shape))
        total = total + (found * tg.tensor(weights)).sum()
        (wanted * torch.tensor(weights)).sum().backward()
        rows.append((f"{name} {array.shape} {options}", found, wanted, x, peer))
    total.backward()
    tg.realize([t for _, found, _, x, _ in rows for t in (found, x.grad)])
    for name, found, wanted, x, peer in rows:
        for a, b in ((found, wanted.detach()), (x.grad, peer.grad)):
            assert a.shape == tuple(b.shape), name
            scale = max(1.0, float(b.abs().max()))
            np.testing.assert_allclose(
                a.numpy() / scale, b.numpy() / scale, tolerance, tolerance, err_msg=name
            )


@pytest.mark.sampled(3)
@pytest.mark.parametrize("size", [1, 2, 3, 8, 12, 17, 64, 100, 101, 127, 128, 130, 194, 211])
def test_sizes(size):
    """Small matrices, products of factors, primes small and large."""
    real, pair = RANDOM.standard_normal((2, size)), RANDOM.standard_normal((2, size, 2))
    check(
        [
            ("fft", pair, True, {}),
            ("ifft", pair, True, {}),
            ("rfft", real, False, {}),
            ("irfft", pair, True, {"n": size}),
        ]
    )


@pytest.mark.parametrize("size", [4096, 1009, pytest.param(2 * 499, marks=pytest.mark.slow)])
def test_large_sizes_in_both_precisions(size):
    pair = RANDOM.standard_normal((2, size, 2))
    exact = torch.view_as_real(torch.fft.fft(torch.view_as_complex(torch.tensor(pair))))
    for dtype, tolerance in ((np.float64, 1e-13), (np.float32, 1e-6)):
        found = tg.fft.fft(tg.tensor(pair.astype(dtype)))
        error = np.abs(found.numpy() - exact.numpy()).max()
        assert found.numpy().dtype == dtype and error < tolerance * float(exact.abs().max())


def test_options():
    real, pair = RANDOM.standard_normal((3, 6, 5)), RANDOM.standard_normal((3, 6, 5, 2))
    cases = []
    for norm in NORMS:
        along = {"norm": norm, "dim": 1}
        cases += [(n, pair, True, along) for n in ("fft", "ifft", "irfft", "hfft")]
        cases += [(n, real, False, {"norm": norm, "dim": -3}) for n in ("rfft", "ihfft")]
    for n in (2, 4, 9):
        cases += [(f, pair, True, {"n": n}) for f in ("fft", "ifft", "irfft", "hfft")]
        cases += [(f, real, False, {"n": n, "dim": 1}) for f in ("rfft", "ihfft")]
    check(cases)


def test_several_axes():
    real, pair = RANDOM.standard_normal((3, 4, 5)), RANDOM.standard_normal((3, 4, 5, 2))
    cases = []
    for options in ({"norm": "ortho"}, {"s": (6, 3)}, {"s": (4, -1), "dim": (1, 0)}):
        cases += [(n, pair, True, options) for n in ("fftn", "ifftn", "irfftn", "fft2", "irfft2")]
        cases += [(n, real, False, options) for n in ("rfftn", "rfft2")]
        cases += [("ifft2", pair, True, options)]
    check(cases)


def test_frequencies_and_shifts():
    for n in (1, 4, 5):
        for ours, peer in (
            (tg.fft.fftfreq(n, 0.5), torch.fft.fftfreq(n, 0.5)),
            (tg.fft.rfftfreq(n, 2.0), torch.fft.rfftfreq(n, 2.0)),
        ):
            np.testing.assert_allclose(ours.numpy(), peer.numpy())
    x = RANDOM.standard_normal((4, 5))
    for name in ("fftshift", "ifftshift"):
        for dim in (None, 1, (0,)):
            ours = getattr(tg.fft, name)(tg.tensor(x), dim)
            assert (ours.numpy() == getattr(torch.fft, name)(torch.tensor(x), dim).numpy()).all()


def test_there_and_back_inside_of_transforms():
    x = tg.tensor(RANDOM.standard_normal((4, 30)))
    again = tg.jit(lambda x: tg.fft.irfft(tg.fft.rfft(x), 30))(x)
    np.testing.assert_allclose(again.numpy(), x.numpy(), atol=1e-13)
    each = tg.vmap(tg.fft.rfft)(x)
    np.testing.assert_allclose(each.numpy(), tg.fft.rfft(x).numpy(), atol=1e-13)
    assert tg.fft.rfft(tg.arange(4)).dtype is tg.float32


def test_mistakes():
    for call, error in (
        (lambda: tg.fft.fft(tg.ones(4)), tg.ShapeError),
        (lambda: tg.fft.fft(tg.ones(4, 3)), tg.ShapeError),
        (lambda: tg.fft.rfft(tg.ones(4), dim=1), tg.ShapeError),
        (lambda: tg.fft.rfft(tg.ones(4), n=0), tg.ShapeError),
        (lambda: tg.fft.rfft(tg.ones(4).to(tg.float16)), tg.DTypeError),
        (lambda: tg.fft.rfft(tg.ones(4), norm="both"), tg.UserError),
        (lambda: tg.fft.fftn(tg.ones(4, 4, 2), dim=(0, 0)), tg.ShapeError),
    ):
        with pytest.raises(error):
            call()
