"""Record what a loss uses.

The record holds each read of a batch's targets, and of their number. It also tells which outputs of
models can be reached from the loss in the autograd graph, and whether these outputs were made from
targets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from hf_distca.errors import UnsupportedError
from hf_distca.integration.callers import is_in_model

TARGETS, LABELS, ITEMS = "shift_labels", "labels", "num_items_in_batch"
# A node of an autograd graph, and the index of one of its outputs. DDP has one node for all
# outputs of a model.
GraphPlace = tuple[Any, int]
# Names of model outputs that do not depend on targets. All other outputs may depend on them.
_TARGET_FREE_OUTPUTS = {
    "attentions",
    "aux_loss",
    "hidden_states",
    "last_hidden_state",
    "logits",
    "past_key_values",
    "router_logits",
    "z_loss",
}
# Torch functions that do not compute with values. They pass values on or return a shape, for
# example.
_value_free = """
    __format__ __get__ __getitem__ __hash__ __len__ __repr__ __set__ __setitem__
    clone contiguous cpu cuda detach dim element_size expand flatten get_device int is_contiguous
    is_floating_point is_pinned long ndimension numel pin_memory ravel record_stream reshape size
    squeeze storage_offset stride to type unsqueeze untyped_storage view view_as
"""
_VALUE_FREE_FUNCTIONS = frozenset(_value_free.split())


class SpyTensor(torch.Tensor):
    """A tensor that calls its `report_read` when its values are read, or shifted along the row. The
    argument of the call is True if the values are shifted.
    """

    report_read: Callable[[bool], object] = bool  # calling `bool` has no effect

    @classmethod
    def wrap_tensor(cls, tensor: torch.Tensor, report_read: Callable[[bool], object]) -> SpyTensor:
        """Return the tensor as a `SpyTensor` with this `report_read`."""
        spy = tensor.as_subclass(cls)
        spy.report_read = report_read
        return spy

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch, and report if the function reads or shifts values of a spy.

        A result with the same values becomes a spy as well. Other results are plain tensors.
        """
        call: Callable[..., Any] = super().__torch_function__
        result = call(func, types, args, kwargs or {})
        spies = list(_find_spies((args, kwargs)))
        name = getattr(func, "__name__", "")
        is_moved = name == "roll" or (name == "__getitem__" and _leaves_first_out(args[1]))
        if name in _VALUE_FREE_FUNCTIONS and not is_moved:
            return (
                cls.wrap_tensor(result, spies[0].report_read)
                if isinstance(result, torch.Tensor) and spies
                else result
            )
        for spy in spies:
            spy.report_read(is_moved)
        return (
            type(result)(map(_strip_spy, result))
            if isinstance(result, (tuple, list))
            else _strip_spy(result)
        )


def _leaves_first_out(index: Any) -> bool:
    """Return whether an index is ``1:``, or a tuple that ends with ``1:``."""
    last = index[-1] if isinstance(index, tuple) else index
    return isinstance(last, slice) and last.start == 1 and last.stop is None


def _find_spies(values: Any) -> Iterator[SpyTensor]:
    if isinstance(values, SpyTensor):
        yield values
    elif isinstance(values, (tuple, list, dict)):
        for value in values.values() if isinstance(values, dict) else values:
            yield from _find_spies(value)


def _strip_spy(value: Any) -> Any:
    return value.as_subclass(torch.Tensor) if isinstance(value, SpyTensor) else value


@dataclass(eq=False)
class LossWatch:
    """Record of the inputs (targets, labels and the number of targets) that a loss uses.

    Attributes:
        ids: the tokens of the batch, if they are known.
        names_read: names of the inputs that the loss read itself.
        names_given: maps the place of each model output in the graph to the names of the inputs
            that the model got.
    """

    ids: torch.Tensor | None = None
    names_read: set[str] = field(default_factory=set)
    names_given: dict[GraphPlace, set[str]] = field(default_factory=dict)

    def watch_value(self, value: Any, name: str) -> Any:
        """Return a tensor as a `SpyTensor` that records reads. Return any other value unchanged,
        and record it as read.
        """
        if isinstance(value, torch.Tensor):
            return SpyTensor.wrap_tensor(value, partial(self.record_read, name))
        self.names_read.add(name)
        return value

    def record_read(self, name: str, is_moved: bool = False) -> None:
        """Record that the loss read an input. Reads inside a model do not count.

        Raises:
            UnsupportedError: if the loss shifts targets along the row.
        """
        if is_in_model():  # read by a model whose calls are not recorded, such as a teacher
            return
        if is_moved and name == TARGETS:
            raise UnsupportedError(
                "the loss shifts `shift_labels`, which are already shifted. Where a document is"
                " cut, the labels for a second shift are on another rank. Read `shift_labels`"
                " without shifting them, or train on whole documents with PackingCollator."
            )
        self.names_read.add(name)

    def forget_batch(self) -> None:
        """Release the batch and its graph, but keep `names_read`."""
        self.ids = None
        self.names_given.clear()

    @contextmanager
    def record_calls(self, models: Iterable[torch.nn.Module]) -> Iterator[None]:
        """Record the names of the inputs that models get in a ``with`` block. Give the models plain
        tensors, because reads by a model are not reads by the loss.
        """
        calls: list[set[str]] = []

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def begin_call(
            _: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[Any, Any]:
            self._check_call((*args, *kwargs.values()), kwargs)
            calls.append({name for name, value in kwargs.items() if isinstance(value, SpyTensor)})
            return tuple(map(_strip_spy, args)), {
                name: _strip_spy(value) for name, value in kwargs.items()
            }

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def end_call(_: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self.names_given |= dict.fromkeys(_find_target_places(output), calls.pop())

        with ExitStack() as hooks:
            for model in models:
                hooks.enter_context(model.register_forward_pre_hook(begin_call, with_kwargs=True))
                hooks.enter_context(model.register_forward_hook(end_call))
            yield

    def _check_call(self, values: Iterable[Any], keywords: Mapping[str, Any]) -> None:
        if keywords.get("distca_documents") is None and any(value is self.ids for value in values):
            other_names = ", ".join(sorted(keywords.keys() - {"input_ids"})) or "nothing else"
            raise UnsupportedError(
                f"the model is called with input_ids and {other_names}, but without"
                " distca_documents, which tells where the documents of a dealt batch begin, and"
                " which ranks hold the parts of a cut document. Call model(**inputs)."
            )

    def find_loss_reason(self, loss: torch.Tensor) -> str | None:
        """Return what is wrong with a loss that several ranks compute; None if it is right."""
        reached = _collect_places(loss) & self.names_given.keys()
        from_targets = {place for place in reached if TARGETS in self.names_given[place]}
        names = self.names_read.union(*(self.names_given[place] for place in reached))
        if not names & {TARGETS, LABELS}:
            return None
        if TARGETS not in names:
            return (
                "is not made of `shift_labels`: it reads `labels`, which are -100 in shares,"
                " because labels cannot be shifted where documents are cut. Pass shift_labels to"
                " the model under this name and use its loss, or read shift_labels, which are"
                " shifted already."
            )
        is_models_loss = _get_place(loss) in from_targets
        if not any(ITEMS in self.names_given[place] for place in from_targets) and (
            is_models_loss or ITEMS not in self.names_read
        ):
            return (
                "is not divided by `num_items_in_batch`, the number of targets of all ranks: each"
                " rank would divide by its own number, and ranks differ. Pass num_items_in_batch to"
                " the model, or use super().compute_loss(model, inputs,"
                " num_items_in_batch=num_items_in_batch). For a weighted mean, multiply the weights"
                " by num_items_in_batch / the sum of the weights of all ranks, and divide by"
                " num_items_in_batch."
            )
        if is_models_loss:
            return (
                "is the model's loss, unchanged: a sum divided by the number of targets of all"
                " ranks. Averaging gradients over ranks divides it again. Multiply it by"
                " self.accelerator.num_processes, or use super().compute_loss(model, inputs,"
                " num_items_in_batch=num_items_in_batch)."
            )
        return None


def _find_target_places(output: Any) -> list[GraphPlace]:
    """Find the outputs of a model that may depend on targets. Return the places of these outputs in
    the graph.
    """
    values: Iterable[Any] = [output]
    if isinstance(output, Mapping):
        values = [value for name, value in output.items() if name not in _TARGET_FREE_OUTPUTS]
    elif isinstance(output, (tuple, list)):  # the first item may be a loss, which has no dimensions
        values = [value for value in output[:1] if getattr(value, "shape", None) == ()]
    return [
        _get_place(value)
        for value in values
        if isinstance(value, torch.Tensor) and value.grad_fn is not None
    ]


def _get_place(value: torch.Tensor) -> GraphPlace:
    return value.grad_fn, value.output_nr


def _collect_places(loss: torch.Tensor) -> set[GraphPlace]:
    """Collect the places in the graph that can be reached from a loss."""
    reached = {_get_place(loss)}
    remaining = list(reached)
    while remaining:
        node, _ = remaining.pop()
        next_places = {place for place in node.next_functions if place[0] is not None} - reached
        reached |= next_places
        remaining += next_places
    return reached
