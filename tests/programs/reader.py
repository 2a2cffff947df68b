"""Reads DATASET (rows made by `row_of`, or lines by `line_of`, which two processes fetch) with job.loader, proves every
sample, and writes the ids of each step to FOLDER. Of more datasets, parted by commas, a batch is read each step, too.

reader.py DATASET FOLDER STEPS PAUSE_S
"""

import json
import os
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import tenplexrun


def row_of(ids: np.ndarray, size: int) -> np.ndarray:
    """Row [size] uint8 of each id [n]."""
    return ((ids[:, None] * 2654435761 + np.arange(size) * (ids[:, None] % 7 + 1)) % 251).astype(np.uint8)


def line_of(number: int) -> dict[str, object]:
    """Of 2 to 8 KiB."""
    return {"number": number, "text": chr(97 + number % 26) * (2000 + number * 7919 % 6000)}


def proved(batch, lines: bool) -> bool:
    if lines:
        return [line for rows in batch.rows for line in rows] == [line_of(number) for number in batch.ids.tolist()]
    return np.array_equal(batch.rows, row_of(batch.ids, batch.rows.shape[1]))


def main() -> None:
    datasets, folder, steps, pause_s = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
    job = tenplexrun.init()
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job.state(model=model, optimizer=optimizer)
    dataset, *others = datasets.split(",")
    lines = dataset.startswith("jsonl:")
    options = {"num_workers": 2, "collate_fn": list} if lines else {}
    loader = job.loader(dataset, global_batch=24, micro_batch=4, seed=7, **options)
    beside = [job.loader(other, global_batch=24, micro_batch=4, seed=8) for other in others]
    with (folder / f"ids-{job.round:03d}-{dist.get_rank()}-{os.getpid()}.jsonl").open("w", buffering=1) as file:
        for step, batch in job.steps(loader, until=steps):
            if not proved(batch, lines):
                raise SystemExit(f"step {step}: samples that are not those of their ids")
            for other in beside:
                if not proved(other.next_batch(), False):
                    raise SystemExit(f"step {step}: samples beside that are not those of their ids")
                other.commit()
            dist.barrier()
            file.write(
                json.dumps({"step": step, "rank": dist.get_rank(), "ids": batch.ids[batch.weights > 0].tolist()}) + "\n"
            )
            time.sleep(pause_s)


if __name__ == "__main__":
    main()
