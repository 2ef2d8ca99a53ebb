"""The plain PyTorch example with checkpoints, for failures that take memory with them (a node is lost).

    leto run --nnodes 2:3 ... plain_checkpoint.py --folder /shared/run7

A checkpoint of a rank is one file, renamed into place when it is whole: its name is its completion marker.
The ranks agree on the newest step that all of them have. Its state is that of the run at that step, random
streams included, so that a run that goes back to it ends with the bits of one that never had to.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import leto_shadow
from leto_rmp import Client, Role
from leto_rmu import Action, AdamW, Decision, Hyper, ResumableUpdater, Segment, SyncResult, UpdatePlan

PLANES = ("master", "exp_avg", "exp_avg_sq")


class Checkpointed(leto_shadow.Trainer):
    spare_level = 2  # levels 1 and 2 need no rank

    def prepare(self, ctx):
        parser = argparse.ArgumentParser()
        parser.add_argument("--iterations", type=int, default=5000)
        parser.add_argument("--folder", type=Path, required=True, help="for checkpoints; seen by all nodes")
        parser.add_argument("--interval", type=int, default=10, help="iterations between two checkpoints")
        parser.add_argument("--keep", type=int, default=3, help="checkpoints that are kept")
        self.options = parser.parse_args(ctx.args)

    def build(self, ctx):
        with torch.device("meta"):
            self.model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 1))

    def path(self, ctx, step):
        return self.options.folder / f"{step}.{ctx.rank}"

    def whole(self, ctx):
        """Steps of which this rank has a whole checkpoint."""
        found = (path.name.split(".") for path in self.options.folder.glob(f"*.{ctx.rank}"))
        return sorted(int(step) for step, _ in found)

    def save(self, ctx):
        state = {
            (name, plane): self.updater.state(name, plane) for name in self.names for plane in PLANES[1:]
        }
        state |= {(name, "master"): self.updater.master(name) for name in self.names}
        path = self.path(ctx, self.updater.iteration)
        partial = path.with_suffix(f".{ctx.rank}-partial")
        with open(partial, "wb") as file:
            torch.save((state, self.updater.job_state), file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        for step in self.whole(ctx)[: -self.options.keep]:
            self.path(ctx, step).unlink()

    def load(self, ctx, step):
        state, job_state = torch.load(self.path(ctx, step))
        for (name, plane), saved in state.items():
            view = self.updater.master(name) if plane == "master" else self.updater.state(name, plane)
            view.copy_(saved)
        self.updater.initialize(step, job_state, keep_state=True)

    def train(self, ctx):
        client = Client.connect(ctx.manager_socket)
        client.attach(Role.WRITER, ctx.generation)
        segments, numel = [], 0
        for name, parameter in self.model.named_parameters():
            segments.append(Segment(name, parameter.numel(), grad_offset=numel))
            numel += parameter.numel()
        self.names = [segment.name for segment in segments]
        plan = UpdatePlan(segments, AdamW(), config=client.config, grad_numel=numel)
        self.updater = updater = ResumableUpdater(client, plan, barrier=ctx.barrier)
        views = {name: updater.master(name).view(p.shape) for name, p in self.model.named_parameters()}
        self.model.load_state_dict(views, assign=True)
        for segment, parameter in zip(segments, self.model.parameters(), strict=True):
            parameter.grad = updater.grads[segment.grad_offset :][: segment.numel].view_as(parameter)

        decision = Decision.decode(ctx.exchange(updater.summary(self.whole(ctx))))
        updater.recover(decision.encode())
        source = "in-place"
        if decision.action is Action.CHECKPOINT:
            self.load(ctx, decision.step)
            source = "checkpoint"
        elif decision.action is Action.FRESH:
            torch.manual_seed(1)
            for parameter in self.model.parameters():
                nn.init.normal_(parameter, std=0.05)
            torch.manual_seed(1000 + ctx.rank)
            updater.initialize(job_state=torch.get_rng_state().numpy().tobytes())
            source = "fresh"
        torch.set_rng_state(torch.frombuffer(bytearray(updater.job_state), dtype=torch.uint8))
        ctx.resumed(updater.iteration, source)

        for iteration in range(updater.iteration, self.options.iterations):
            ctx.progress("forward", iteration)
            ctx.point("forward", iteration)
            updater.compute_begins()
            updater.grads.zero_()
            x = torch.randn(32, 64)
            loss = nn.functional.mse_loss(self.model(x), x.square().mean(1, keepdim=True))
            loss.backward()
            ctx.progress("reduce", iteration)
            dist.all_reduce(updater.grads)
            updater.grads.div_(ctx.world_size)
            ctx.progress("protect", iteration)
            state = torch.get_rng_state().numpy().tobytes()
            updater.step([Hyper(1e-3)], state, sync=SyncResult)
            ctx.metrics(iteration, loss=loss.item())
            if updater.iteration % self.options.interval == 0:
                ctx.progress("checkpoint", iteration)
                self.save(ctx)
        torch.save(self.model.state_dict(), self.options.folder / f"final-{ctx.rank}")


leto_shadow.run(Checkpointed())
