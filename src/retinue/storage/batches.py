"""A batch of a log as one transaction: fenced by the epoch of its owner, and recognised when it is tried again."""

from __future__ import annotations

from collections.abc import Sequence

from ..core.errors import OwnershipLost, StoreError
from ..core.stores import LogBatch
from .lanes import Link, Unmet
from .packs import PackedRow, pack_rows
from .saving import is_terminal, saving_run, saving_thread

_OWNED = "log_id = ? AND epoch = ? AND owner IS NOT NULL AND ended = 0"
_NEW = " AND NOT EXISTS (SELECT 1 FROM events WHERE log_id = ? AND (seq, sub) >= (?, ?))"
_COLUMNS = "log_id, seq, sub, kind, held, body, private"


class BatchWrite:
    """A batch, encoded."""

    def __init__(self, place: str, batch: LogBatch) -> None:
        self._place, self._batch = place, batch
        self._rows = pack_rows(batch.log_id, batch.rows)
        saved = {update.record.thread_id for update in batch.threads}
        # Saving the thread of a root that has ended releases it too, in one statement.
        ended = {
            run.identity.thread_id for run in batch.runs if is_terminal(run) and run.identity.run_id == batch.log_id
        }
        saves = [
            saving_thread(update, batch.log_id if update.record.thread_id in ended else None)
            for update in batch.threads
        ]
        saves += [saving_run(run, release=run.identity.thread_id not in ended & saved) for run in batch.runs]
        self._saves = saves

    @property
    def threads(self) -> Sequence[str]:
        """The threads that it changes."""
        batch = self._batch
        saved = [update.record.thread_id for update in batch.threads]
        return saved + [run.identity.thread_id for run in batch.runs if is_terminal(run)]

    def write(self, link: Link) -> None:
        batch, log_id = self._batch, self._batch.log_id
        try:
            self._append(link)
        except Unmet:
            self._check_written(link)
            return
        for save in self._saves:
            save(link)
        for reply in batch.replies:
            answer = "UPDATE inbox SET reply = ? WHERE log_id = ? AND wish_id = ? AND reply IS NULL"
            link.run(answer, reply.body, log_id, reply.wish_id)
        link.notify(log_id)

    def _append(self, link: Link) -> None:
        """Insert the rows and release the log, if it is owned at this epoch and has none of these rows yet."""
        batch = self._batch
        where, values = _OWNED, [batch.log_id, batch.epoch]
        if self._rows:
            first = batch.rows[0]
            where, values = _OWNED + _NEW, [*values, batch.log_id, first.seq, first.sub]
        if batch.released or batch.ended:
            owned = f"UPDATE logs SET owner = NULL, ended = {int(batch.ended)} WHERE {where} RETURNING 1"
        else:
            owned = f"SELECT 1 FROM logs WHERE {where}{link.locking}"
        link.insert_if(owned, values, f"events ({_COLUMNS})", self._rows)

    def _check_written(self, link: Link) -> None:
        """Raise unless this very batch was written before, by a try whose outcome was lost."""
        batch = self._batch
        found = link.run("SELECT epoch, owner, ended FROM logs WHERE log_id = ?", batch.log_id)
        epoch, owner, ended = found[0] if found else (None, None, 1)
        is_ours = epoch == batch.epoch
        if self._rows:
            if self._stored_rows(link) == self._rows:
                return
            if is_ours and owner is not None and not ended:
                raise StoreError(self._place, f"the log of run {batch.log_id!r} has other rows than those written here")
        elif is_ours and owner is None and (batch.released or batch.ended) and bool(ended) == batch.ended:
            return
        raise OwnershipLost(self._place, batch.log_id)

    def _stored_rows(self, link: Link) -> list[PackedRow]:
        first, last = self._batch.rows[0], self._batch.rows[-1]
        return link.run(
            f"SELECT {_COLUMNS} FROM events WHERE log_id = ? AND (seq, sub) >= (?, ?) AND (seq, sub) <= (?, ?) "
            "ORDER BY seq, sub",
            *(self._batch.log_id, first.seq, first.sub, last.seq, last.sub),
        )
