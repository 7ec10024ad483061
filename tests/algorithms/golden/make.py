"""Makes merge.json and outer.json: the formulas of the papers in plain Python floats (float64), without this package.

Run ``python tests/algorithms/golden/make.py`` to make them again; the inputs come from a fixed seed and are exact in fp32.
"""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

HERE = Path(__file__).parent
Vector = list[float]


def norm(x: Vector) -> float:
    return math.sqrt(math.fsum(a * a for a in x))


def mean(weights: Vector, vectors: list[Vector]) -> Vector:
    return [math.fsum(w * v[i] for w, v in zip(weights, vectors, strict=True)) / math.fsum(weights) for i in range(len(vectors[0]))]


def unit(x: Vector) -> Vector:
    length = norm(x)
    return [a / length for a in x] if length else [0.0] * len(x)


def rda(weights: Vector, vectors: list[Vector]) -> Vector:
    """Radial-directional averaging, arXiv 2604.21428: mean norm times direction of the mean direction."""
    direction = mean(weights, [unit(v) for v in vectors])
    if norm(direction) <= 1e-6 and any(norm(v) for v in vectors):
        return mean(weights, vectors)
    radius = math.fsum(w * norm(v) for w, v in zip(weights, vectors, strict=True)) / math.fsum(weights)
    return [radius * a for a in unit(direction)]


def sgd(deltas: list[Vector], lr: float, momentum: float, nesterov: bool, warmup: bool) -> list[Vector]:
    """Values after each commit, from zeros; PyTorch's SGD with the delta as negative gradient."""
    value, velocity, path = [0.0] * len(deltas[0]), [0.0] * len(deltas[0]), []
    for number, delta in enumerate(deltas, 1):
        m = min(momentum, 1 - 1 / number) if warmup else momentum
        velocity = [m * v + d for v, d in zip(velocity, delta, strict=True)]
        update = [d + m * v for d, v in zip(delta, velocity, strict=True)] if nesterov else velocity
        value = [x + lr * u for x, u in zip(value, update, strict=True)]
        path.append(value)
    return path


def main() -> None:
    rng = random.Random(20260424)

    def vector(length: int, scale: float = 1.0) -> Vector:
        return [scale * rng.randint(-256, 256) / 64 for _ in range(length)]

    merges = []
    for count, length, scales in [(2, 5, (1, 1)), (3, 8, (1, 1, 1)), (4, 8, (1, 4, 0.25, 1)), (8, 33, (1,) * 8), (16, 7, (2,) * 16)]:
        weights = [rng.randint(1, 64) / 4 for _ in range(count)]
        vectors = [vector(length, scale) for scale in scales]
        merges.append({"weights": weights, "vectors": vectors, "mean": mean(weights, vectors), "rda": rda(weights, vectors)})
    a = vector(6)
    for weights, vectors in [
        ([1.0, 1.0], [a, [-x for x in a]]),
        ([2.0, 1.0, 1.0], [a, [0.0] * 6, [-x for x in a]]),
        ([1.0, 3.0], [[0.0] * 6] * 2),
    ]:
        merges.append({"weights": weights, "vectors": vectors, "mean": mean(weights, vectors), "rda": rda(weights, vectors)})
    (HERE / "merge.json").write_text(json.dumps(merges, indent=1) + "\n")

    deltas = [vector(4) for _ in range(6)]
    outers = [
        {"lr": lr, "momentum": m, "nesterov": n, "warmup": w, "deltas": deltas, "path": sgd(deltas, lr, m, n, w)}
        for lr, m, n, w in [
            *((1.0, 0.0, True, True), (0.7, 0.9, True, False), (0.7, 0.9, True, True)),
            *((0.7, 0.5, False, False), (0.5, 0.9, False, True)),
        ]
    ]
    (HERE / "outer.json").write_text(json.dumps(outers, indent=1) + "\n")


if __name__ == "__main__":
    main()
