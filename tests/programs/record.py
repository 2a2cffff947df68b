"""Plain DDP under torch.distributed.elastic's @record, which fails once: rank 1 of the first attempt raises."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel


@record
def main():
    dist.init_process_group("gloo")
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ.get("FAIL_ONCE") and dist.get_rank() == 1:
        raise RuntimeError("fails once")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(10):
        loss = model(torch.full((8, 16), float(dist.get_rank() + step))).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if dist.get_rank() == 0:
        print(f"final loss {loss.item():.9g}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
