"""Hugging Face accelerate: Accelerator finds the launcher's environment by itself."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    accelerator = Accelerator(cpu=True)
    set_seed(1)
    x = torch.randn(128, 16)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8, shuffle=True, num_workers=1)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(2):
        for inputs, targets in loader:
            loss = (model(inputs) - targets).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    total = accelerator.gather(loss.detach()).mean()
    if accelerator.is_main_process:
        print(f"final loss {total.item():.9g} {accelerator.num_processes} processes", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
