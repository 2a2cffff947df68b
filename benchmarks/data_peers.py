"""Other loaders on the rows of an .npy file, in an environment of their own; data.py runs it.

    data_peers.py ROWS.npy FOLDER BATCH RUNS

Prints, last, one JSON line: {loader: rows a second of the processor, one for each run}. FOLDER is for copies in their
own formats.
"""

import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from types import ModuleType

import numpy as np
import torch

SHARE = 8_192
"""Rows of a run: these loaders are slower."""


def rates(batches: Iterable[object], batch: int, runs: int) -> Iterator[float]:
    """Of each run but the first; batches come without end."""
    turns = iter(batches)
    for number in range(runs + 1):
        began = time.process_time()
        for _ in range(SHARE // batch):
            next(turns)
        if number:
            yield SHARE / (time.process_time() - began)


def stateful(array: np.ndarray, batch: int) -> Iterator[object]:
    """torchdata's loader over a map-style dataset."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    class Rows(torch.utils.data.Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return len(array)

        def __getitem__(self, number: int) -> torch.Tensor:
            return torch.from_numpy(array[number])

    loader = StatefulDataLoader(Rows(), batch_size=batch, shuffle=True)
    while True:
        yield from loader


def mosaic(array: np.ndarray, folder: str, batch: int) -> Iterator[object]:
    """MosaicML's dataset over a local copy, in torch's loader."""
    # Its part for images wants a torchvision that fits torch's build, and is not needed here.
    sys.modules["streaming.vision"] = ModuleType("streaming.vision")
    from streaming import MDSWriter, StreamingDataset
    from torch.utils.data import DataLoader

    with MDSWriter(out=folder, columns={"row": "bytes"}) as writer:
        for row in array:
            writer.write({"row": row.tobytes()})
    dataset = StreamingDataset(local=folder, shuffle=True, batch_size=batch)

    def collate(samples: list[dict[str, bytes]]) -> np.ndarray:
        return np.frombuffer(b"".join([sample["row"] for sample in samples]), np.uint8).reshape(len(samples), -1)

    while True:
        yield from DataLoader(dataset, batch_size=batch, drop_last=True, collate_fn=collate)


def main() -> None:
    path, folder, batch, runs = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    array = np.load(path)
    found = {}
    makers = {
        "torchdata StatefulDataLoader": lambda: stateful(array, batch),
        "MosaicML StreamingDataset": lambda: mosaic(array, os.path.join(folder, "mds"), batch),
    }
    for name, make in makers.items():
        try:
            found[name] = list(rates(make(), batch, runs))
        except ImportError as error:
            print(f"{name}: {error}", file=sys.stderr)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
