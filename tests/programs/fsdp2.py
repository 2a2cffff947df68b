"""FSDP2: fully_shard over the default mesh."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def main():
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(10):
        x = torch.randn(16, 32, generator=data)
        loss = (model(x) - x[:, :8]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    total = loss.detach().clone()
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        print(f"final loss {total.item():.9g}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
