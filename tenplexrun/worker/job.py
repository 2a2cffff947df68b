"""What a training script holds: the job, its mesh, and the loop over its steps."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from tenplexrun.core.layout import Stages
from tenplexrun.core.parallel import ParallelConfig
from tenplexrun.core.shuffle import FEISTEL
from tenplexrun.errors import UsageError
from tenplexrun.worker import device
from tenplexrun.worker.agent import Agent
from tenplexrun.worker.ahead import Source
from tenplexrun.worker.data import Batch, Loader, open_loader
from tenplexrun.worker.launch import Launch, Place, parallel_from_env
from tenplexrun.worker.placements import Rules
from tenplexrun.worker.session import Session
from tenplexrun.worker.state import State, Stateful

_groups = itertools.count()


def init(parallel: ParallelConfig | None = None) -> Job:
    """Join the job: process group (nccl with GPUs, else gloo) and device mesh.

    Under `tenplexrun` the launcher says how the world is divided, and `parallel` may only repeat it. Under torchrun
    and plain python it is `parallel`, else `TENPLEX_PP`, `TENPLEX_TP` ... of the environment, else data parallel.
    Raises UsageError when the world cannot be divided like this.
    """
    launch = Launch.from_env(os.environ)
    config = parallel or parallel_from_env(os.environ, launch.world_size)
    if config.world_size != launch.world_size:
        raise UsageError(f"{config} has {config.world_size} ranks, the launcher started {launch.world_size} workers")
    if launch.agent and config != parallel_from_env(os.environ, launch.world_size):
        raise UsageError(f"the script asks for {config}, the launcher for another; leave init()'s `parallel` out")
    where = device.pick(int(os.environ.get("LOCAL_RANK", "0")))
    if launch.agent and where.type == "cpu":
        # a forked worker's own OMP_NUM_THREADS is read by nobody: OpenMP started in the parent
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if not dist.is_initialized():
        _join(device.backend(where))
    mesh = init_device_mesh(where.type, tuple(map(config.size, config.order)), mesh_dim_names=config.order)
    return Job(launch, Place(config, config.coord(launch.rank), where), mesh, Agent(launch) if launch.agent else None)


def _join(backend: str) -> None:
    if "RANK" not in os.environ:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
        return
    store, rank, world_size = next(rendezvous("env://"))
    # Keys of its own: those of a group that the script has had and destroyed are still there, and would be believed.
    store = PrefixStore(f"tenplexrun-{next(_groups)}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)


class Job:
    """One rank's view of a round. Made by `tenplexrun.init`.

    mesh      DeviceMesh with the axes ("pp", "dp", "cp", "tp"), outermost first, those of size 1 included
    parallel  their sizes; coord: this rank's index on each; rank, round, device
    """

    def __init__(self, launch: Launch, place: Place, mesh: DeviceMesh, agent: Agent | None) -> None:
        self._launch, self._place, self._agent = launch, place, agent
        self.mesh, self.parallel, self.coord, self.device = mesh, place.config, place.coord, place.device
        self.rank, self.round, self.launched = launch.rank, launch.round, agent is not None
        self._state: State | None = None
        self._source = Source(agent.source, place) if agent is not None and agent.source else None

    def state(
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: Stateful | None = None,
        stages: Stages | None = None,
        rules: Rules | None = None,
    ) -> State:
        """Declare what must survive. DTensors describe themselves; see `placements.spec_of` for `rules`.

        `model`: this rank's modules, parameters and buffers under names that are the same on every stage.
        `stages`: which names belong to which pipeline stage. Raises LayoutError for what cannot be described.
        """
        self._state = State(model, optimizer, scheduler, stages, rules or {}, self._place)
        if self._source is not None:
            self._source.aim(self._state.layout())
        return self._state

    def loader(
        self,
        dataset: Any,
        *,
        global_batch: int,
        micro_batch: int,
        seed: int = 0,
        tail: str = "short",
        order_algo: str = FEISTEL,
        fingerprint: str = "",
        **options: Any,
    ) -> Loader:
        """The job's samples in the global order, this dp rank's share of each step: see `worker.data.Batch`.

        `dataset` is a name as in `tenplexrun.formats`, or a map-style dataset of torch's; `global_batch` samples a
        step, whatever the parallelism. `options` are those of torch's DataLoader that do not change the order
        (num_workers, collate_fn, ...): with any, or with samples of different sizes, a batch's rows are a tuple of
        collated micro-batches; else they are one array. Under the launcher samples are read from the nodes' memory.
        `order_algo`: see `core.shuffle`. Raises DataError.
        """
        return open_loader(
            dataset,
            global_batch=global_batch,
            micro_batch=micro_batch,
            seed=seed,
            tail=tail,
            order_algo=order_algo,
            fingerprint=fingerprint,
            dp_rank=self.coord["dp"],
            dp_size=self.parallel.dp,
            show=self._agent.view if self._agent else None,
            **options,
        )

    def steps(self, loader: Loader, until: int, state: State | None = None) -> Iterator[tuple[int, Batch]]:
        """Yield (step, batch) from the step to go on with up to `until` - 1.

        Before the first: state, data position and random streams are those of the snapshot to go on from, if any.
        Between steps: snapshots are taken, and the round is left (RoundStopped, a SystemExit) where all ranks leave it.
        Without the launcher: steps from 0, nothing is kept.
        """
        state = state or self._state
        if state is None:
            raise UsageError("job.steps must know what to keep: call job.state(model=..., optimizer=...) before it")
        source, self._source = self._source, None
        session = Session(self._agent, self._launch, self._place, state, loader, source) if self._agent else None
        start = session.begin() if session else 0
        try:
            for step in range(start, until):
                if session:
                    session.before(step)
                began = time.monotonic()
                yield step, loader.next_batch()
                loader.commit()
                if session and step == start:
                    session.first_step_done(time.monotonic() - began)
            if session:
                session.finish(until)
        finally:
            loader.close()
