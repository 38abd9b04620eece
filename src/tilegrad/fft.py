# ruff: noqa: F401
"""Fourier transforms, with PyTorch's names (`torch.fft`); complex numbers are pairs."""

from .tensor.fft import (
    fft,
    fft2,
    fftfreq,
    fftn,
    fftshift,
    hfft,
    ifft,
    ifft2,
    ifftn,
    ifftshift,
    ihfft,
    irfft,
    irfft2,
    irfftn,
    pairs,
    rfft,
    rfft2,
    rfftfreq,
    rfftn,
)
