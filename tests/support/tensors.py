"""Seeded tensors for the tests, on the GPU where there is one, and how alike two tensors are."""

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def random_int8(*shape, seed=0):
    """int8 in -127..127 on DEVICE, the same on every machine."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-127, 128, shape, dtype=torch.int8, generator=generator).to(DEVICE)


def random_float(*shape, seed=0, dtype=torch.float32):
    """Standard normal values on DEVICE, the same on every machine."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def low_rank_of_integers(rows, rank, channels, dtype, seed=0):
    """Factors whose products and sums no float32 rounds, in whatever order."""
    from kernels import LowRank

    generator = torch.Generator().manual_seed(seed)
    up = torch.randint(-3, 4, (rows, rank), generator=generator)
    down = torch.randint(-3, 4, (rank, channels), generator=generator) / 64
    return LowRank(up.to(DEVICE, dtype), down.to(DEVICE, dtype))


def int8_accumulate(q, weight):
    """The bare sums of the GEMM's kernel: int8 [M, K] or [M, 2K] x int8 [N, K] -> int32 [M, N]."""
    from kernels.linear.gemm import TunedGemm

    sums = torch.empty(len(q), len(weight), dtype=torch.int32, device=q.device)
    TunedGemm()((q, None, weight, None, None), (sums,))
    return sums


def rotation_matrix(group):
    """The regular Hadamard matrix in float64, written out as the Kronecker power of its 4 x 4 base."""
    base = torch.tensor([[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]], dtype=torch.float64)
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < group:
        matrix = torch.kron(matrix, base)
    return (matrix / group**0.5).to(DEVICE)


def statistics_of(inputs):
    """What a calibration learns of the inputs of some calls."""
    from kernels import ActivationStatistics

    statistics = ActivationStatistics()
    for x in inputs:
        statistics.update(x)
    return statistics


def relative_error(actual, expected):
    """Norm of the difference relative to the norm of `expected`."""
    return float((actual - expected).norm() / expected.norm())


def cosine(a, b):
    """Cosine of the angle between two tensors of any shape."""
    return float(torch.nn.functional.cosine_similarity(a.double().flatten(), b.double().flatten(), dim=0))
