"""Loaders and Trainers that would hand ranks other batches than distca needs, or make another loss of them, refused by name."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from accelerate.data_loader import BatchSamplerShard, DataLoaderDispatcher, IterableDatasetShard
from accelerate.utils import DistributedType
from torch.utils.data import BatchSampler, DistributedSampler, SequentialSampler

from hf_distca.data.collator import IGNORED_LABEL, PackingCollator
from hf_distca.data.shares import Shares
from hf_distca.data.streaming import StreamedShares
from hf_distca.errors import UnsupportedError
from hf_distca.integration.document_shares import shares_of
from hf_distca.integration.families import why_whole
from hf_distca.integration.loading import distca_configs
from hf_distca.integration.session import current_session

if TYPE_CHECKING:
    from transformers import PreTrainedModel, Trainer, TrainingArguments

    from hf_distca.agreement.dealt import Dealt
    from hf_distca.integration.callers import MaskCall

__all__ = ["check_dealing", "check_loader", "check_sharing", "check_step"]

_log = logging.getLogger("hf_distca")

Wrong = Iterator[str]  # what is wrong, and what to set

# What a batch of a share must still have when it comes to the model.
_NEEDED = {"distca_documents", "position_ids", "shift_labels"}


def check_loader(
    loader: object,
    *,
    model: torch.nn.Module | None = None,
    args: TrainingArguments | None = None,
    trainer: Trainer | None = None,
    evaluating: bool = False,
) -> None:
    """Refuse what would not give every rank its own batches and shares, or not train on shares as one process would.

    Args:
        loader: prepared by accelerate or a plain one of torch; None passes.
        model: that trains or evaluates, if it is known.
        args: of the Trainer, if there is one.
        trainer: itself, if it was found.
        evaluating: whether the loader is for evaluation.

    Raises:
        UnsupportedError: says what was seen, and what to set.
    """
    shares = None if loader is None else shares_of(loader)
    _check_reader(loader, shares is not None)
    if shares is None:
        return
    ranks = shares.dealing.ranks
    wrong = (
        *_wrong_reading(loader, shares),
        *(() if evaluating else _wrong_epochs(loader, shares)),
        *_wrong_loss(args, trainer, ranks),
        *_wrong_model(model, ranks, "make the shares for one rank", "Pack whole documents with PackingCollator instead"),
        *(_wrong_evaluation(trainer) if evaluating and ranks > 1 else ()),
    )
    _refuse(f"a data set of shares for {ranks} {'ranks' if ranks > 1 else 'rank'}", wrong)


def check_sharing(trainer: Trainer, ranks: int) -> None:
    """Refuse a Trainer that would not train on what `share_tokens` deals as it would on what its ranks have drawn.

    Args:
        trainer: about to train.
        ranks: of the attention group; one alone keeps what it has drawn.

    Raises:
        UnsupportedError: says what was seen, and what to set.
    """
    whole = "leave shares_tokens out"
    wrong = *_wrong_loss(trainer.args, trainer, ranks), *_wrong_model(trainer.model, ranks, whole, f"To keep them whole, {whole}")
    _refuse(f"shares_tokens = True, which deals what {ranks} ranks have drawn among them", wrong)


def check_dealing(trainer: Trainer, ranks: int, evaluating: bool) -> None:
    """Refuse a Trainer that would not train on documents dealt to `ranks` ranks, or evaluate on them, as one process would.

    Raises:
        UnsupportedError: says what was seen, and what to set.
    """
    whole = "Train without hf_distca.deal, which keeps documents whole"
    wrong = (
        *_wrong_loss(trainer.args, trainer, ranks),
        *_wrong_model(trainer.model, ranks, "train without hf_distca.deal", whole),
        *(_wrong_evaluation(trainer) if evaluating and ranks > 1 else ()),
    )
    _refuse(f"hf_distca.deal for {ranks} ranks", wrong)


def _refuse(what: str, wrong: Sequence[str]) -> None:
    if wrong:
        raise UnsupportedError(f"{what}, and {wrong[0]}")


def _check_reader(loader: object, shares: bool) -> None:
    """Refuse a loader of several processes in which rank 0 reads packed documents for all ranks.

    accelerate does so for iterable datasets unless told otherwise. It joins the rows of all ranks to one tensor, broadcasts and
    cuts it, which neither rows of different lengths nor `PackedDocuments` survive: rank 0 fails while the others wait for it.
    """
    if not isinstance(loader, DataLoaderDispatcher) or loader.state.distributed_type == DistributedType.NO:
        return
    collator = getattr(loader, "collate_fn", None)
    collator = getattr(collator, "data_collator", collator)  # the Trainer wraps it to drop columns
    if isinstance(collator, PackingCollator) or shares:
        raise UnsupportedError(
            "rank 0 would read the batches of all ranks and broadcast them, as accelerate does by default for iterable datasets; "
            'packed documents cannot travel so. Set TrainingArguments(accelerator_config={"dispatch_batches": False}). Each rank '
            "then reads the dataset, in the same order, and accelerate leaves it its share: do not split the dataset by rank "
            "yourself, or each rank gets a share of its share."
        )


_checked: WeakKeyDictionary[object, set[bool]] = WeakKeyDictionary()  # Trainers and models, by whether they trained then


def check_step(call: MaskCall, dealt: Dealt) -> None:
    """Refuse what `check_loader` refuses in the first forward with a share, for those who have no `DistCACallback`.

    Raises:
        UnsupportedError: as `check_loader`; by the second forward's backward, if the loss reads `labels`.
    """
    *_, model = call.models()
    trainer = call.trainer
    known = _checked.setdefault(model if trainer is None else trainer, set())
    if model.training in known:
        return
    if trainer is not None:
        handler = trainer.callback_handler
        loader = handler.train_dataloader if model.training else handler.eval_dataloader
        if loader is not None and shares_of(loader) is not None:
            check_loader(loader, model=trainer.model, args=trainer.args, trainer=trainer, evaluating=not model.training)
        elif model.training:
            check_sharing(trainer, dealt.ranks)
    if model.training and dealt.ranks > 1:
        _watch_loss(model)
        _warn_of_routers(model, dealt.ranks)
    known.add(model.training)


def _warn_of_routers(model: PreTrainedModel, ranks: int) -> None:
    config = model.config.get_text_config(decoder=True)
    if getattr(config, "output_router_logits", False) and current_session().is_first:
        _log.warning(
            "%s models add a loss of their routers (output_router_logits=True), and each of %d ranks computes it for its own "
            "tokens: it is not that of one process with all of them. The Trainer adds up the losses of all ranks, so "
            "router_aux_loss_coef=%s counts %d times. Divide it by %d, or set output_router_logits=False.",
            *(config.model_type, ranks, getattr(config, "router_aux_loss_coef", None), ranks, ranks),
        )


def _watch_loss(model: PreTrainedModel) -> None:
    """Refuse a loss that gives the logits of a share no gradient, until one does: it reads `labels`, which are empty there."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def watch(_: torch.nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        logits, targets = getattr(output, "logits", None), kwargs.get("shift_labels")
        if targets is not None and isinstance(logits, torch.Tensor) and logits.requires_grad:
            logits.register_hook(lambda gradient: look(gradient, targets))  # type: ignore[no-untyped-call]

    def look(gradient: torch.Tensor | None, targets: torch.Tensor) -> None:
        # DDP gives what it found unused none: under autocast the loss reads a float32 copy that accelerate makes of outputs.
        if gradient is None or gradient.any():
            hook.remove()
        elif (targets != IGNORED_LABEL).any():
            raise UnsupportedError(
                f"the loss of {type(model).__name__} gives its logits no gradient, though shift_labels has targets: it reads "
                "`labels`, which are -100 in shares, as they could not be shifted where documents are cut. Read `shift_labels`, "
                "which are shifted already."
            )

    hook = model.register_forward_hook(watch, with_kwargs=True)


def _wrong_reading(loader: Any, shares: Shares | StreamedShares) -> Wrong:
    """What makes ranks get other shares than their own."""
    if not getattr(loader, "in_order", True):
        yield (
            "batches come as workers finish them: ranks would hold shares of different global batches. Set "
            "dataloader_in_order=True."
        )
    columns = getattr(getattr(loader, "collate_fn", None), "signature_columns", None)  # all that the Trainer leaves in
    if columns is not None and (dropped := sorted(_NEEDED - set(columns))):
        yield f"the Trainer drops {', '.join(dropped)} from them. Set TrainingArguments(remove_unused_columns=False)."
    batches, shard, processes = _read_by(loader)
    if shard is not None and shard.split_batches:
        yield (
            f"split_batches=True cuts batches of {shard.batch_size} into one part for each process. Set "
            'accelerator_config={"split_batches": False} and per_device_train_batch_size=1.'
        )
    if processes is None:
        kind = type(getattr(batches, "sampler", batches)).__name__
        yield (
            f"{kind} reads them in an order of its own. Set "
            'TrainingArguments(train_sampling_strategy="sequential"), or shuffle=False in a DataLoader: epochs of shares are '
            "shuffled already."
        )
        return
    if batches.batch_size != 1:
        yield (
            f"batches of {batches.batch_size}. Set per_device_train_batch_size=1 and per_device_eval_batch_size=1; "
            "tokens_per_rank says how large a batch is."
        )
    ranks, config = shares.dealing.ranks, shares.dealing.config
    readers = ranks if getattr(shares, "rank", None) is None else 1  # a stream may yield the shares of one rank alone
    world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    # Each group takes global batches of its own, in turns.
    groups = readers > 1 and (config.group_size == ranks or config.group_ranks(world) == ranks < world)
    if processes % readers if groups else processes != readers:
        yield (
            f"{processes} {'process reads' if processes == 1 else 'processes read'} them. Make them for as many ranks as there "
            "are data-parallel processes, and let accelerate prepare the loader."
        )
    items = 0 if isinstance(loader.dataset, torch.utils.data.IterableDataset) else len(loader.dataset)
    if items % processes and not batches.drop_last:
        yield (
            f"{items} of them for {processes} processes: the last batches would be filled up with the first shares. Set "
            "dataloader_drop_last=True."
        )


def _read_by(loader: Any) -> tuple[Any, Any, int | None]:
    """What makes batches, what of accelerate's leaves each process its own, and of how many processes; None if out of order."""
    if isinstance(loader.dataset, torch.utils.data.IterableDataset):
        shard = loader.dataset if isinstance(loader.dataset, IterableDatasetShard) else None
        return (loader, None, 1) if shard is None else (shard, shard, shard.num_processes)
    batches, shard = loader.sampler if isinstance(loader.sampler, BatchSampler) else loader.batch_sampler, None
    while hasattr(batches, "batch_sampler"):  # accelerate's, around the one that makes the batches
        shard = batches if isinstance(batches, BatchSamplerShard) else shard
        batches = batches.batch_sampler
    sampler = getattr(batches, "sampler", None)
    if isinstance(sampler, DistributedSampler) and not sampler.shuffle:
        return batches, shard, sampler.num_replicas
    in_order = isinstance(sampler, SequentialSampler)
    return batches, shard, (1 if shard is None else shard.num_processes) if in_order else None


def _wrong_epochs(loader: Any, shares: Shares | StreamedShares) -> Wrong:
    shuffled = isinstance(shares, StreamedShares) or shares.batches.seed is not None
    if shuffled and not hasattr(loader.dataset, "set_epoch"):
        yield (
            f"a {type(loader.dataset).__name__} around them does not pass set_epoch on, as `select`, `concatenate_datasets` and "
            "Subset do not: every epoch would have the order of the first. Select documents before document_shares, or give what "
            "is around shares a method set_epoch."
        )


def _wrong_loss(args: TrainingArguments | None, trainer: Trainer | None, ranks: int) -> Wrong:
    """What makes another loss of shares than of whole documents. On one rank, nothing is cut."""
    if ranks == 1:
        return
    missing = "`labels`, which lack the targets where documents are cut"
    if args is not None and args.label_smoothing_factor > 0:
        yield f"label_smoothing_factor={args.label_smoothing_factor} shifts {missing}. Set label_smoothing_factor=0.0."
    if args is not None and not args.average_tokens_across_devices:
        yield (
            "average_tokens_across_devices=False: each rank would divide its loss by its own number of targets, and ranks "
            "differ. Set average_tokens_across_devices=True."
        )
    if trainer is None:
        return
    if (function := trainer.compute_loss_func) is not None:
        name = getattr(function, "__name__", type(function).__name__)
        yield (
            f"compute_loss_func={name} gets {missing}. Leave it out, or override Trainer.compute_loss, which gets `shift_labels`."
        )
    if not trainer.model_accepts_loss_kwargs:
        name = type(trainer.accelerator.unwrap_model(trainer.model)).__name__
        yield (
            f"the loss of {name} is a mean over each rank's own targets (accepts_loss_kwargs=False), and ranks differ. Train its "
            "text model; or set model.accepts_loss_kwargs = True before the Trainer is made, if its loss takes "
            "num_items_in_batch."
        )


def _wrong_model(model: torch.nn.Module | None, ranks: int, alone: str, whole: str) -> Wrong:
    """What makes a model compute something else of a document that is cut; `alone` and `whole` say how to have none cut."""
    if model is None or ranks == 1:
        return
    configs = distca_configs(model)
    if not configs:
        yield (
            f'no part of {type(model).__name__} has attn_implementation="distca": other attention sees no more than one rank. '
            f"Load the model with it, or {alone}."
        )
    for config in configs:
        if (why := why_whole(config.model_type)) is not None:
            yield f"{config.model_type} models need whole documents: {why}. {whole}."
    for part in model.modules():
        adapters = getattr(part, "peft_config", None)
        for adapter in adapters.values() if isinstance(adapters, dict) else ():
            if getattr(adapter, "is_prompt_learning", False):
                name = getattr(adapter.peft_type, "value", adapter.peft_type)
                yield f"{name} puts virtual tokens in front of the tokens of every rank. Use another adapter, such as LoRA."


def _wrong_evaluation(trainer: Trainer | None) -> Wrong:
    if not current_session().config.balance_evaluation:
        yield (
            "each rank evaluates alone, and has only parts of documents. Set DistCAConfig(balance_evaluation=True) if all ranks "
            "evaluate together."
        )
    if trainer is not None and trainer.compute_metrics is not None and "shift_labels" not in trainer.label_names:
        yield (
            f"compute_metrics gets {', '.join(trainer.label_names)}, and in shares only shift_labels hold the targets. Set "
            'TrainingArguments(label_names=["shift_labels"]); they are shifted already.'
        )
