"""Data-parallel training in plain PyTorch (no Megatron) that goes on when a trainer is killed.

    leto run --nproc-per-node 2 --page-bytes 16384 --data-pages 48 --tier1-pages 6 plain_pytorch.py
    leto inject kill --rank 1          # from another terminal, as often as you like

Parameters are views of retained memory (the fp32 masters), gradients of the gradient region. The random
state that draws data and dropout is committed with every iteration: a killed run ends
with the bits of an undisturbed one.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn

import leto_shadow
from leto_rmp import Client, Role
from leto_rmu import Action, AdamW, Hyper, ResumableUpdater, Segment, SyncResult, UpdatePlan


class Example(leto_shadow.Trainer):
    spare_level = 2  # levels 1 and 2 need no rank: a spare node goes through them ahead

    def prepare(self, ctx):  # level 1: no memory, no communication yet
        parser = argparse.ArgumentParser()
        parser.add_argument("--iterations", type=int, default=5000)
        parser.add_argument("--save", help="write the final parameters of each rank to SAVE.RANK")
        self.options = parser.parse_args(ctx.args)

    def build(self, ctx):  # level 2: shapes only; level 3, the process group, is the default's
        with torch.device("meta"):
            self.model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 1))

    def retire(self, ctx):  # after another rank's failure: back to level 2, the same process
        self.disconnect(ctx)
        self.build(ctx)  # a model without views of retained memory
        return 2

    def train(self, ctx):  # promoted: this process is the one writer now
        client = Client.connect(ctx.manager_socket)
        client.attach(Role.WRITER, ctx.generation)
        segments, numel = [], 0
        for name, parameter in self.model.named_parameters():
            segments.append(Segment(name, parameter.numel(), grad_offset=numel))
            numel += parameter.numel()
        plan = UpdatePlan(segments, AdamW(), config=client.config, grad_numel=numel)
        updater = ResumableUpdater(client, plan, barrier=ctx.barrier)  # it breaks when a rank is gone
        views = {name: updater.master(name).view(p.shape) for name, p in self.model.named_parameters()}
        self.model.load_state_dict(views, assign=True)
        for segment, parameter in zip(segments, self.model.parameters(), strict=True):
            parameter.grad = updater.grads[segment.grad_offset :][: segment.numel].view_as(parameter)

        found = updater.recover(ctx.exchange(updater.summary()))
        if found.action is Action.FRESH:
            torch.manual_seed(1)
            for parameter in self.model.parameters():
                nn.init.normal_(parameter, std=0.05)
            torch.manual_seed(1000 + ctx.rank)
            updater.initialize(job_state=torch.get_rng_state().numpy().tobytes())
        torch.set_rng_state(torch.frombuffer(bytearray(updater.job_state), dtype=torch.uint8))
        ctx.resumed(updater.iteration, "fresh" if found.action is Action.FRESH else "in-place")

        for iteration in range(updater.iteration, self.options.iterations):
            ctx.progress("forward", iteration)  # phases tell who hangs: not a rank that waits for others
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
        if self.options.save:
            torch.save(self.model.state_dict(), f"{self.options.save}.{ctx.rank}")


leto_shadow.run(Example())
