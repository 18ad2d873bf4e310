"""Milliseconds of one frame's gradient of CleanRL's IMPALA CNN in PyTorch; called by measure.py, and without JAX."""

import os
import statistics
import sys
import time


def main(name: str, batch: int, seconds: float) -> None:
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self, channels):
            super().__init__()
            self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))

        def forward(self, x):
            return x + self.second(torch.relu(self.first(torch.relu(x))))

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    layers, channels = [], 3
    for features in (16, 32, 32):
        layers += [nn.Conv2d(channels, features, 3, padding=1), nn.MaxPool2d(3, 2, 1), Block(features), Block(features)]
        channels = features
    network = nn.Sequential(*layers, nn.Flatten(), nn.ReLU(), nn.Linear(channels * 8 * 8, 256), nn.ReLU())
    frames = torch.randint(0, 256, (batch, 3, 64, 64), dtype=torch.uint8)
    if "channels last" in name:
        network, frames = network.to(memory_format=torch.channels_last), frames.to(memory_format=torch.channels_last)
    times, end = [], None
    while end is None or time.perf_counter() < end:
        start = time.perf_counter()
        network.zero_grad()
        for part in frames.split(8 if "8 frames" in name else batch):
            with torch.autocast("cpu", torch.bfloat16, enabled="bfloat16" in name):
                loss = (network(part.float() / 255) ** 2).sum()
            loss.backward()
        times.append(time.perf_counter() - start)
        end = end or time.perf_counter() + seconds
    print(1e3 * statistics.median(times[1:]) / batch, "PyTorch", torch.__version__.partition("+")[0])


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
