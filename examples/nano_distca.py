"""Core attention disaggregation in one file: torchrun --nproc_per_node 2 examples/nano_distca.py.

Every rank holds packed documents. Ranks have equally many tokens, but unequal attention. Layers
with weights run on the rank that holds a token: its home. Core attention, softmax(QK^T)V, has no
weights: rows [start, end) of a document need only q[start:end], k[:end] and v[:end]. Any rank that
receives these rows can compute attention, so ranks with little attention serve ranks with much.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

DOCUMENTS = [[1024], [128] * 8, [512] * 2, [32] * 32]  # lengths on ranks 0 to 3, known to all ranks
TILE = 16  # rows move in multiples of this, because fast kernels compute whole tiles
ROW_TIME = 8  # sending a row takes as long as computing 8 query-key pairs (a made-up figure)


class Task(NamedTuple):
    """Attention for query rows [start, end) of the document at row `offset` of its home."""

    home: int
    offset: int
    start: int
    end: int
    server: int

    @property
    def rows(self) -> tuple[int, int, int]:
        """How many rows of q, k and v the server gets. Outputs have as many rows as q."""
        return self.end - self.start, self.end, self.end


def end_times(tasks: list[Task], world: int) -> list[int]:
    """Add up what each rank computes, sends and receives in the forward, in query-key pairs."""
    ends = [0] * world
    for task in tasks:
        queries, keys, _ = task.rows
        ends[task.server] += queries * (task.start + keys + 1) // 2  # row i sees the keys [0, i]
        if task.server != task.home:
            for rank in (task.home, task.server):
                ends[rank] += ROW_TIME * (sum(task.rows) + queries)
    return ends


def meet(deadline: float, tasks: list[Task], world: int) -> list[Task] | None:
    """Move last rows of documents until all ranks meet the deadline. Return None on failure."""
    while max(ends := end_times(tasks, world)) > deadline:
        home, server = ends.index(max(ends)), ends.index(min(ends))
        # Last rows of the longest document see the most keys, so moving them saves the most work.
        longest = max((t for t in tasks if t.home == t.server == home), key=lambda t: t.end)
        others, moved = [t for t in tasks if t is not longest], None
        for cut in range(longest.end - TILE, longest.start, -TILE):
            kept, tail = longest._replace(end=cut), longest._replace(start=cut, server=server)
            ends = end_times([*others, kept, tail], world)
            if ends[server] > deadline:
                break  # a longer tail would make the server late
            moved = [*others, kept, tail]
            if ends[home] <= deadline:
                break  # the home has given enough
        if moved is None:
            return None
        tasks = moved
    return tasks


def make_plan(documents: list[Task], world: int) -> list[Task]:
    """Search for the earliest deadline that `meet` can meet, within 1 %. Return its plan."""
    plan, ends = documents, end_times(documents, world)
    low, high = sum(ends) / world, max(ends)  # no plan can beat the mean
    while high > 1.01 * low:
        deadline = (low + high) / 2
        found = meet(deadline, documents, world)
        plan = found or plan
        low, high = (low, deadline) if found else (deadline, high)
    return plan


class Exchange(torch.autograd.Function):
    """All-to-all of rows, with two lists of (rank, row count): rows sent, and rows received."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, *lists: list[tuple[int, int]]) -> Tensor:
        ctx.lists, ranks = lists, range(dist.get_world_size())
        sent, got = ([sum(n for r, n in sizes if r == rank) for rank in ranks] for sizes in lists)
        arrived = rows.new_empty(sum(got), *rows.shape[1:])
        dist.all_to_all_single(arrived, rows.contiguous(), got, sent)
        return arrived

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return Exchange.apply(gradient, *reversed(ctx.lists)), None, None  # back to the senders


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Compute core attention on one rank. Tensors are (rows, heads, width)."""
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, mask).transpose(0, 1)


def attend_by_plan(q: Tensor, k: Tensor, v: Tensor, plan: list[Task], rank: int) -> Tensor:
    """Compute core attention for this rank's rows on their servers. All ranks must call this."""
    # All ranks sort tasks in one order, so messages need no header. Ranks also send to themselves.
    mine = sorted((t for t in plan if t.home == rank), key=lambda t: t.server)
    served = sorted((t for t in plan if t.server == rank), key=lambda t: t.home)
    places, parts, outputs = [], [], []
    for t in mine:
        keys = torch.arange(t.offset, t.offset + t.end)
        places.append(keys[t.start :])
        parts += [q[keys[t.start :]], k[keys], v[keys]]
    dispatch = [(t.server, sum(t.rows)) for t in mine], [(t.home, sum(t.rows)) for t in served]
    arrived = Exchange.apply(torch.cat(parts), *dispatch)
    for t, part in zip(served, arrived.split([n for _, n in dispatch[1]]), strict=True):
        mask = torch.ones(t.end - t.start, t.end, dtype=torch.bool).tril(t.start)
        outputs.append(attend(*part.split(t.rows), mask))
    back = [(t.home, t.rows[0]) for t in served], [(t.server, t.rows[0]) for t in mine]
    returned = Exchange.apply(torch.cat(outputs), *back)
    return returned[torch.cat(places).argsort()]  # outputs in the order of the queries


def main() -> None:
    """Print the plan, and check two layers of planned attention against packed attention."""
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    documents = []
    for home, lengths in enumerate((DOCUMENTS * world)[:world]):
        documents += [Task(home, sum(lengths[:i]), 0, n, home) for i, n in enumerate(lengths)]
    plan = make_plan(documents, world)
    if rank == 0:
        mean = sum(end_times(documents, world)) / world
        for name, tasks in ("before", documents), ("after", plan):
            ends = end_times(tasks, world)
            print(f"{name}: ranks end at {ends} pairs, slowest / mean {max(ends) / mean:.2f}")
        for home, at, a, b, server in [t for t in plan if t.server != t.home]:
            print(f"rank {server} serves rank {home}: q[{a}:{b}] of its document at row {at}")
    torch.manual_seed(rank)
    q, k, v = torch.randn(3, 1024, 4, 16, dtype=torch.float64).requires_grad_().unbind()
    mask = torch.block_diag(*[torch.ones(n, n) for n in DOCUMENTS[rank % 4]]).tril().bool()
    planned = attend_by_plan(attend_by_plan(q, k, v, plan, rank), k, v, plan, rank)  # two layers
    packed = attend(attend(q, k, v, mask), k, v, mask)
    both = [[out, *torch.autograd.grad(out.square().sum(), (q, k, v))] for out in (planned, packed)]
    torch.testing.assert_close(*both, rtol=1e-12, atol=1e-12)
    print(f"rank {rank}: outputs and gradients are those of packed attention to 1e-12")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
