"""Characters drawn as pen strokes.

A character is a set of polylines in a box one unit high, y pointing down. To draw it, its segments are transformed into
pixel space and every pixel takes its brightness from the distance to the nearest segment. That makes the strokes
antialiased, keeps their thickness independent of the transform, and is one batched expression on any device.
"""

from itertools import pairwise
from math import cos, pi, radians, sin

import torch

from .alphabet import ALPHABET

SIZE = 64  # image side, px
HEIGHT = 38.0  # height of a character at scale 1, px, measured between stroke centres

Point = tuple[float, float]
Stroke = list[Point]


# Half-ranges, or ranges, of the uniform random variation that `draw` applies.
SHIFT = 4.0  # px, in x and in y
SCALE = (0.85, 1.10)
ROTATION = 6.0  # degrees
SLANT = 0.12  # x moved per unit of y
RADIUS = (1.9, 3.1)  # half the stroke thickness, px
CANONICAL_RADIUS = 2.5  # px


def _arc(cx: float, cy: float, rx: float, ry: float, start: float, end: float) -> Stroke:
    """Part of an ellipse, from angle `start` to `end` in degrees; 0 points right, 90 points down."""
    steps = max(2, round(abs(end - start) / 20))
    angles = [radians(start + (end - start) * i / steps) for i in range(steps + 1)]
    return [(cx + rx * cos(a), cy + ry * sin(a)) for a in angles]


_BOWL_P = [(0, 0), *_arc(0.30, 0.28, 0.28, 0.28, -90, 90), (0, 0.56)]
_SIX = [_arc(0.30, 0.69, 0.30, 0.31, 0, 360), _arc(0.55, 0.69, 0.55, 0.69, 180, 275)]

# Pairs that are easily confused differ by a whole stroke: 0 is slashed, 1 and I have serifs, Z has a bar, 3 a flat top.
_STROKES: dict[str, list[Stroke]] = {
    "A": [[(0, 1), (0.38, 0), (0.76, 1)], [(0.14, 0.63), (0.62, 0.63)]],
    "B": [
        [(0, 0.48), (0, 0), *_arc(0.30, 0.24, 0.26, 0.24, -90, 90), (0, 0.48)],
        [(0.30, 0.48), *_arc(0.34, 0.74, 0.30, 0.26, -90, 90), (0, 1), (0, 0.48)],
    ],
    "C": [_arc(0.40, 0.5, 0.40, 0.5, -50, -310)],
    "D": [[(0, 1), (0, 0), *_arc(0.25, 0.5, 0.45, 0.5, -90, 90), (0, 1)]],
    "E": [[(0.58, 0), (0, 0), (0, 1), (0.60, 1)], [(0, 0.48), (0.50, 0.48)]],
    "F": [[(0.58, 0), (0, 0), (0, 1)], [(0, 0.48), (0.48, 0.48)]],
    "G": [[*_arc(0.40, 0.5, 0.40, 0.5, -50, -355), (0.80, 0.54), (0.44, 0.54)]],
    "H": [[(0, 0), (0, 1)], [(0.66, 0), (0.66, 1)], [(0, 0.48), (0.66, 0.48)]],
    "I": [[(0.22, 0), (0.22, 1)], [(0, 0), (0.44, 0)], [(0, 1), (0.44, 1)]],
    "J": [[(0.20, 0), (0.50, 0), *_arc(0.25, 0.72, 0.25, 0.28, 0, 165)]],
    "K": [[(0, 0), (0, 1)], [(0.60, 0), (0, 0.60)], [(0.20, 0.42), (0.62, 1)]],
    "L": [[(0, 0), (0, 1), (0.56, 1)]],
    "M": [[(0, 1), (0, 0), (0.40, 0.65), (0.80, 0), (0.80, 1)]],
    "N": [[(0, 1), (0, 0), (0.66, 1), (0.66, 0)]],
    "O": [_arc(0.42, 0.5, 0.42, 0.5, 0, 360)],
    "P": [[(0, 0), (0, 1)], _BOWL_P],
    "Q": [_arc(0.42, 0.5, 0.42, 0.5, 0, 360), [(0.48, 0.66), (0.84, 1.04)]],
    "R": [[(0, 0), (0, 1)], _BOWL_P, [(0.28, 0.56), (0.60, 1)]],
    "S": [[*_arc(0.31, 0.25, 0.29, 0.25, -30, -270), *_arc(0.31, 0.75, 0.31, 0.25, -90, 150)]],
    "T": [[(0, 0), (0.68, 0)], [(0.34, 0), (0.34, 1)]],
    "U": [[(0, 0), *_arc(0.33, 0.68, 0.33, 0.32, 180, 0), (0.66, 0)]],
    "V": [[(0, 0), (0.36, 1), (0.72, 0)]],
    "W": [[(0, 0), (0.22, 1), (0.44, 0.30), (0.66, 1), (0.88, 0)]],
    "X": [[(0, 0), (0.66, 1)], [(0.66, 0), (0, 1)]],
    "Y": [[(0, 0), (0.34, 0.5), (0.68, 0)], [(0.34, 0.5), (0.34, 1)]],
    "Z": [[(0, 0), (0.64, 0), (0, 1), (0.64, 1)], [(0.12, 0.5), (0.52, 0.5)]],
    "0": [_arc(0.30, 0.5, 0.30, 0.5, 0, 360), [(0.13, 0.77), (0.47, 0.23)]],
    "1": [[(0, 0.24), (0.26, 0), (0.26, 1)], [(0.02, 1), (0.50, 1)]],
    "2": [[*_arc(0.30, 0.28, 0.30, 0.28, -165, 35), (0, 1), (0.60, 1)]],
    "3": [[(0.02, 0), (0.56, 0), *_arc(0.28, 0.69, 0.30, 0.31, -90, 140)]],
    "4": [[(0.46, 1), (0.46, 0), (0, 0.68), (0.64, 0.68)]],
    "5": [[(0.54, 0), (0.08, 0), *_arc(0.27, 0.68, 0.30, 0.32, -135, 145)]],
    "6": _SIX,
    "7": [[(0, 0), (0.60, 0), (0.20, 1)]],
    "8": [_arc(0.30, 0.24, 0.25, 0.24, 0, 360), _arc(0.30, 0.74, 0.30, 0.26, 0, 360)],
    "9": [[(0.60 - x, 1 - y) for x, y in stroke] for stroke in _SIX],
}


def _segments() -> torch.Tensor:
    """Every character as segments: float32 [36, S, 2 ends, 2 (x, y)], each character centred on its bounding box.

    Shorter characters repeat their first segment, which leaves the nearest distance unchanged.
    """
    characters = []
    for character in ALPHABET:
        pairs = [pair for stroke in _STROKES[character] for pair in pairwise(stroke)]
        ends = torch.tensor(pairs, dtype=torch.float32)
        corners = ends.flatten(0, 1)
        characters.append(ends - (corners.amin(0) + corners.amax(0)) / 2)
    longest = max(len(ends) for ends in characters)
    return torch.stack([torch.cat([ends, ends[:1].expand(longest - len(ends), 2, 2)]) for ends in characters])


_SEGMENTS = _segments()


def render(classes: torch.Tensor, transform: torch.Tensor, shift: torch.Tensor, radius: torch.Tensor) -> torch.Tensor:
    """Draw characters under given transforms.

    classes: int64 [B]; transform: float32 [B, 2, 2], acts on (x, y) in character heights; shift: float32 [B, 2] (x, y)
    in px from the image centre; radius: float32 [B], half the stroke thickness in px. All on one device.
    Returns float32 [B, 64, 64] in [0, 1].
    """
    device = classes.device
    # The widest temporary is [chunk, S, 64, 64]; the CPU is fastest while that stays near its caches.
    chunk = 16 if device.type == "cpu" else 1024
    segments = _SEGMENTS.to(device)
    axis = torch.arange(SIZE, device=device, dtype=torch.float32) - (SIZE - 1) / 2
    images = []
    for part in torch.arange(len(classes), device=device).split(chunk):
        ends = segments[classes[part]] @ transform[part].mT.unsqueeze(1) * HEIGHT + shift[part, None, None]
        start, step = ends[:, :, 0], ends[:, :, 1] - ends[:, :, 0]  # [b, S, 2]
        dx = axis - start[..., 0:1]  # [b, S, 64]: the two offsets depend on one axis each
        dy = axis - start[..., 1:2]
        step_x, step_y = step[..., 0:1], step[..., 1:2]
        norm = (step_x.square() + step_y.square()).clamp(min=1e-6)  # where two arcs join, a segment has no length
        along = (dx * step_x / norm).unsqueeze(-2) + (dy * step_y / norm).unsqueeze(-1)  # [b, S, y, x]
        nearest = along.clamp(0, 1)
        # |d - t s|^2 = |d|^2 + |s|^2 t (t - 2 d.s / |s|^2)
        squared = nearest.mul_(nearest - 2 * along).mul_(norm.unsqueeze(-1))
        squared.add_(dx.square().unsqueeze(-2)).add_(dy.square().unsqueeze(-1))
        distance = squared.amin(1).clamp_(min=0).sqrt_()
        images.append((radius[part, None, None] + 0.5 - distance).clamp_(0, 1))
    return torch.cat(images)


def affine(scale: torch.Tensor, rotation: torch.Tensor, slant: torch.Tensor) -> torch.Tensor:
    """[B, 2, 2] transform that slants (positive: to the right at the top), rotates (degrees) and scales; inputs [B]."""
    c, s = torch.cos(rotation * (pi / 180)), torch.sin(rotation * (pi / 180))
    rows = torch.stack([c, -slant * c - s, s, c - slant * s], dim=-1).unflatten(-1, (2, 2))
    return rows * scale[:, None, None]


def draw(
    classes: torch.Tensor, generator: torch.Generator | None = None, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Draw characters with random variation.

    classes: int64 [B], places in ALPHABET; generator must live on `device`. Returns float32 [B, 64, 64] in [0, 1].
    """
    random = torch.rand(len(classes), 6, generator=generator, device=device)
    signed = random * 2 - 1
    (low, high), (thin, thick) = SCALE, RADIUS
    transform = affine(low + (high - low) * random[:, 2], ROTATION * signed[:, 3], SLANT * signed[:, 4])
    return render(classes.to(device), transform, SHIFT * signed[:, :2], thin + (thick - thin) * random[:, 5])
