"""Ranks that take a document which is cut, and how many of its tokens each takes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from hf_distca.schedule.cost import FloatArray
from hf_distca.schedule.layout import IntArray

__all__ = ["divide", "first_found", "takers"]

Found = TypeVar("Found")

# Parts of a document that make all of it, with what rounding may lack.
_ALL = 1 - 1e-9


def takers(
    part: FloatArray, per_node: int, *, most: int | None = None, alone: bool = False
) -> tuple[list[int], list[float]] | None:
    """Ranks that can take all of a document together, those that can take most of it first, and what part each can.

    Args:
        part: of the document that each rank can take.
        per_node: ranks of a node. They are of one node if one is enough, or else of as few as can be.
        most: None is found if that needs more ranks than this.
        alone: none is found if that needs more than one node.
    """
    if float(part.max()) * (most or len(part)) < _ALL:
        return None
    ranks = np.flatnonzero(part > 0)
    if per_node < len(part):
        ranks = _in_nodes(ranks, part, per_node, alone=alone)
    each = part[ranks]
    if most is not None and len(ranks) > most:
        largest = each >= np.partition(each, -most)[-most]
        ranks, each = ranks[largest], each[largest]
    order = np.argsort(-each, kind="stable")
    each = each[order]
    enough = int(np.searchsorted(np.cumsum(each), _ALL)) + 1
    if enough > min(len(order), most or len(order)):
        return None
    return ranks[order[:enough]].tolist(), each[:enough].tolist()


def _in_nodes(ranks: IntArray, part: FloatArray, per_node: int, *, alone: bool) -> IntArray:
    """Those of the ranks that are in the node with the least that is enough, or else in as few nodes as can be."""
    node = ranks // per_node
    of_node = np.bincount(node, weights=part[ranks])
    enough = np.flatnonzero(of_node >= _ALL)
    if len(enough):
        return np.asarray(ranks[node == enough[np.argmin(of_node[enough])]])
    if alone:
        return ranks[:0]
    fullest = np.argsort(-of_node, kind="stable")
    count = int(np.searchsorted(np.cumsum(of_node[fullest]), _ALL)) + 1
    return ranks[np.isin(node, fullest[:count])]


def divide(length: int, rooms: list[int], parts: list[float], tile: int) -> list[int]:
    """Tokens for each rank, in proportion to these parts and in whole tiles where the room allows."""
    scale = length / math.fsum(parts)
    tokens: list[int] = []
    wanted, given = 0.0, 0
    for room, part in zip(rooms, parts, strict=True):
        wanted += part * scale
        count = max(int(wanted / tile + 0.5) * tile - given, 0)
        # What is nearly all of its room is all of it: what is left would only cut another document.
        tokens.append(min(room if part * scale > room - tile else count, room, length - given))
        given += tokens[-1]
    for at, room in enumerate(rooms):
        more = min(length - given, room - tokens[at])
        tokens[at] += more
        given += more
    return tokens


def first_found(values: list[float], found: Callable[[float], Found | None]) -> Found | None:
    """What is found for the first value that anything is found for; for later ones there is something, too."""
    # Most often it is the first.
    if values and (best := found(values[0])):
        return best
    low, high = min(1, len(values)), len(values)
    best = None
    while low < high:
        middle = (low + high) // 2
        if result := found(values[middle]):
            best, high = result, middle
        else:
            low = middle + 1
    return best
