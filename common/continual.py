"""Continual learning: the matrix of success rates, its metrics, and its table, CSV and picture."""

import csv
from pathlib import Path

import numpy as np
from rich.table import Table

from common import files
from common.runs import Run


def report(run: Run, step: int, matrix: np.ndarray, names: tuple[str, ...], *, title: str, note: str) -> None:
    """Logs, prints and draws success rates [M, N] on N tasks after each of the first M; writes matrix.csv and .png.

    Logs eval/<task>/success_rate of the newest row, and eval/{ACC,FWT,BWT,BWT+,REM} (see `metrics`).
    """
    summary = metrics(matrix[:, : len(matrix)])
    rates = {f"eval/{name}/success_rate": rate for name, rate in zip(names, matrix[-1], strict=True)}
    run.log(step, rates | {f"eval/{name}": value for name, value in summary.items()})
    write_csv(run.path / "matrix.csv", matrix, names)
    run.save_picture(step, "matrix", draw(matrix, names, title))
    run.print(f"{title}: {note}", table_of(matrix, names), "  ".join(f"{name} {x:.3f}" for name, x in summary.items()))


def metrics(matrix: np.ndarray) -> dict[str, float]:
    """Metrics of success rates [N, N] on task j after task i (Diaz-Rodriguez et al. 2018, section 3).

    ACC: mean accuracy on the tasks learnt so far, over all rows; FWT: forward transfer, the same on later tasks; BWT:
    backward transfer, the change by later tasks; BWT+: its positive part; REM: remembering, 1 minus its negative
    part. With one task all transfer is 0 and REM is 1. Entries of tasks that were not in --tasks yet are NaN; FWT
    ignores them, and is left out if no other is left.
    """
    n = len(matrix)
    pairs, ahead = max(n * (n - 1) / 2, 1), matrix[np.triu_indices(n, 1)]
    backward = np.tril(matrix - np.diag(matrix), -1).sum() / pairs
    ahead = ahead[np.isfinite(ahead)] if n > 1 else np.zeros(1)
    return {
        "ACC": float(np.tril(matrix).sum() / (n * (n + 1) / 2)),
        **({"FWT": float(ahead.mean())} if len(ahead) else {}),
        "BWT": float(backward),
        "BWT+": float(max(0.0, backward)),
        "REM": float(1 - abs(min(0.0, backward))),
    }


def cell(value: float, digits: int) -> str:
    return "" if np.isnan(value) else f"{value:.{digits}f}"  # NaN: of a task that was not in --tasks yet


def table_of(matrix: np.ndarray, names: tuple[str, ...]) -> Table:
    """Success rates [M, N] after each of M tasks."""
    table = Table()
    for column in ("after", *names):
        table.add_column(column.replace("-", "\n"), justify="right")
    for name, row in zip(names, matrix, strict=False):
        table.add_row(name, *(cell(x, 2) for x in row))
    return table


def write_csv(path: Path, matrix: np.ndarray, names: tuple[str, ...]) -> None:
    """Writes success rates [M, N] atomically: a row for each of the first M tasks learnt, a column for each task."""
    with files.atomic_write(path) as temporary, temporary.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["after", *names])
        writer.writerows([name, *(cell(x, 4) for x in row)] for name, row in zip(names, matrix, strict=False))


def heat_map(axis, matrix: np.ndarray, **options) -> None:
    """Draws success rates [M, N] in colours and numbers on matplotlib axes; `options` are passed to `axis.text`."""
    axis.imshow(matrix, vmin=0, vmax=1, cmap="cividis")
    for (i, j), value in np.ndenumerate(matrix):
        axis.text(j, i, cell(value, 2), ha="center", va="center", color="k" if value > 0.5 else "w", **options)


def draw(matrix: np.ndarray, names: tuple[str, ...], title: str = "") -> np.ndarray:
    """Renders a heat map of `matrix` [M, N] as uint8 [H, W, 3]."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # late: it takes a second
    from matplotlib.figure import Figure

    rows, columns = matrix.shape
    figure = Figure(figsize=(2 + 0.65 * columns, 2 + 0.45 * rows), dpi=120, layout="constrained")
    axis = figure.subplots()
    heat_map(axis, matrix)
    axis.set_xticks(range(columns), names, rotation=35, ha="right", fontsize=8)
    axis.set_yticks(range(rows), names[:rows], fontsize=8)
    axis.set(xlabel="doors opened in task", ylabel="after learning", title=title)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3]
