"""Streams between ranks and the slices that others serve: one Arrow Flight server per rank.

Each rank keeps one stream open to each other rank's server, so that a request costs no new call,
and the end of a stream, orderly or not, tells the server at once that the rank has gone. Every
stream must show the server's secret. A message is a header and the bytes of tensors behind it,
which are sent from where they lie.

Never use a link in a process that forks afterwards: gRPC does not survive a fork.
"""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight
import torch

from sparkdl.comm.channel import Address, SecretFactory, call_options, location
from sparkdl.errors import ClusterError, CommunicationError
from sparkdl.storage.checkpoint_format import decode, encode
from sparkdl.sync.asynchronous.parameter_server import Push, ServerSlice
from sparkdl.sync.gradient_buckets import Bucket

logger = logging.getLogger(__name__)

CHUNK_BYTES = 8 << 20
"""Largest piece that is sent at once; while one travels the next is written."""
STOP_SECONDS = 3.0
"""How long the end of a server is waited for; longer only if a peer hangs."""

_SCHEMA = pa.schema([("data", pa.uint8())])
_BROKEN = (pa.ArrowException, OSError, StopIteration)


class Messages:
    """One end of a stream."""

    def __init__(self, reader: Any, writer: Any) -> None:
        self._reader = reader
        self._writer = writer
        self._next: Any = None

    def send(self, header: Mapping[str, Any], tensors: Sequence[torch.Tensor] = ()) -> None:
        """Send a header and the bytes of contiguous CPU tensors."""
        data = json.dumps(header).encode()
        for batch in _batches(tensors):
            if data:
                self._writer.write_with_metadata(batch, data)
            else:
                self._writer.write_batch(batch)
            data = b""
        if data:
            self._writer.write_metadata(data)

    def receive(self) -> dict[str, Any] | None:
        """The next header; None at the end of the stream."""
        assert self._next is None, "the tensors of the last message were not taken"
        try:
            chunk = self._reader.read_chunk()
        except StopIteration:
            return None
        self._next = chunk.data
        header: dict[str, Any] = json.loads(chunk.app_metadata.to_pybytes())
        return header

    def fill(self, tensors: Sequence[torch.Tensor]) -> None:
        """Overwrite tensors like those that were sent by what came behind the header."""
        for tensor in tensors:
            room = _bytes(tensor)
            at = 0
            while at < len(room):
                batch = self._next if self._next is not None else self._reader.read_chunk().data
                self._next = None
                stop = at + batch.num_rows
                room[at:stop] = np.frombuffer(batch.column(0).buffers()[1], np.uint8, stop - at)
                at = stop


class SliceServer(flight.FlightServerBase):  # type: ignore[misc] # pyarrow has no stubs
    """Serves one slice.

    Args:
        served: the slice.
        host: address to listen on, which the peers can reach.
        on_leave: is told of each rank whose stream has ended.

    Raises:
        ClusterError: the address is not this host's.
    """

    def __init__(self, served: ServerSlice, *, host: str, on_leave: Callable[[int], None]) -> None:
        token = secrets.token_hex(32)
        try:
            super().__init__(location(host, 0), middleware={"secret": SecretFactory(token)})
        except (pa.ArrowException, OSError) as error:
            raise ClusterError(
                f"cannot serve parameters at {host}, which Spark uses for this host ({error}); set "
                "SPARK_LOCAL_IP there to an address of its own that the others can reach"
            ) from error
        self._served = served
        self._on_leave = on_leave
        self._bytes_sent: dict[int, int] = {}
        self.address = Address(host=host, port=self.port, token=token)

    @property
    def bytes_sent(self) -> int:
        """Bytes of tensors that were sent so far."""
        return sum(self._bytes_sent.values())

    def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        """Answer the requests of one rank, one after the other, until it has gone."""
        rank = int(descriptor.command)
        writer.begin(_SCHEMA)
        messages = Messages(reader, writer)
        self._bytes_sent[rank] = 0
        try:
            while (header := messages.receive()) is not None:
                try:
                    self._answer(rank, header, messages)
                except CommunicationError as error:
                    messages.send({"error": str(error)})
        except _BROKEN as error:  # the rank has gone in the midst of it
            logger.debug("the stream of rank %d broke: %s", rank, error)
        finally:
            self._served.leave(rank)
            self._on_leave(rank)

    def stop(self) -> None:
        """Stop listening; all streams should have ended, or be about to."""
        thread = threading.Thread(target=self.shutdown, name="end of a slice server", daemon=True)
        thread.start()
        thread.join(STOP_SECONDS)
        if thread.is_alive():
            logger.debug("a peer does not let go of its stream; the server ends with it")

    def _answer(self, rank: int, header: dict[str, Any], messages: Messages) -> None:
        served = self._served
        if header["kind"] == "close":
            weights, state = served.close_round(rank)
            self._count(rank, [*state.tensors.values()])
            answer = flats(weights) if header["pull"] else []
            self._count(rank, answer)
            encoded = torch.frombuffer(bytearray(b"".join(encode(state))), dtype=torch.uint8)
            messages.send({"state_bytes": len(encoded)}, [*answer, encoded])
            return
        push = None
        if header["push"] is not None:
            messages.fill(flats(served.inbox(rank)))
            push = Push(*header["push"])
        try:
            served.push(rank, push)
        except CommunicationError:
            raise
        except Exception as error:  # the optimizer's; it is raised at the slice's own rank
            raise CommunicationError(f"the optimizer of a slice failed: {error!r}") from error
        answer = flats(served.pull(rank)) if header["pull"] else []
        self._count(rank, answer)
        messages.send({}, answer)

    def _count(self, rank: int, tensors: Sequence[torch.Tensor]) -> None:
        self._bytes_sent[rank] += sum(tensor.nbytes for tensor in tensors)


class SliceLink:
    """A rank's way to the slice of another one. One request at a time.

    Args:
        address: where the slice's server listens.
        rank: who asks.

    Raises:
        CommunicationError: there is no server.
    """

    def __init__(self, address: Address, rank: int) -> None:
        self._where = f"{address.host}:{address.port}"
        self._client = flight.connect(location(address.host, address.port))
        descriptor = flight.FlightDescriptor.for_command(str(rank).encode())
        options = call_options(address.token, None)
        try:
            with self._peer_errors():
                self._writer, self._reader = self._client.do_exchange(descriptor, options)
                self._writer.begin(_SCHEMA)
        except BaseException:
            self._client.close()
            raise
        self._messages = Messages(self._reader, self._writer)
        self.bytes_sent = 0

    def step(
        self, push: Push | None, gradients: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]
    ) -> None:
        """Push, and fill ``weights`` with the slice's; an empty sequence if none are wanted.

        Raises:
            CommunicationError: the server has gone, or says why it cannot go on.
        """
        sent = gradients if push is not None else []
        self._ask({"kind": "step", "push": push, "pull": bool(weights)}, sent, weights)
        self.bytes_sent += sum(tensor.nbytes for tensor in sent)

    def close_round(self, weights: Sequence[torch.Tensor]) -> Any:
        """Close the round; fill ``weights`` as `step` does, and return the slice's state.

        Raises:
            CommunicationError: as `step` does.
        """
        answer = self._ask({"kind": "close", "pull": bool(weights)}, [], weights)
        encoded = torch.empty(answer["state_bytes"], dtype=torch.uint8)
        with self._peer_errors():
            self._messages.fill([encoded])
        return decode(encoded.numpy().tobytes(), f"the state of the slice at {self._where}")

    def cancel(self) -> None:
        """End the stream at once, also while another thread waits for an answer."""
        self._reader.cancel()

    def close(self) -> None:
        """End the stream."""
        self.cancel()
        try:
            self._writer.close()
        except (pa.ArrowException, OSError) as error:  # it says that it was cancelled
            logger.debug("end of the stream to %s: %s", self._where, error)
        self._client.close()

    def _ask(
        self,
        header: dict[str, Any],
        sent: Sequence[torch.Tensor],
        received: Sequence[torch.Tensor],
    ) -> dict[str, Any]:
        with self._peer_errors():
            self._messages.send(header, sent)
            answer = self._messages.receive()
            if answer is None:
                raise CommunicationError(f"the slice at {self._where} has gone")
            if "error" in answer:
                raise CommunicationError(f"the slice at {self._where}: {answer['error']}")
            self._messages.fill(received)
        return answer

    @contextlib.contextmanager
    def _peer_errors(self) -> Iterator[None]:
        try:
            yield
        except _BROKEN as error:
            raise CommunicationError(f"the slice at {self._where} is lost: {error}") from error


def flats(buckets: Sequence[Bucket]) -> list[torch.Tensor]:
    """The memory of buckets, in order; what is sent."""
    return [bucket.flat for bucket in buckets if bucket.flat.numel()]


def _batches(tensors: Sequence[torch.Tensor]) -> Iterator[pa.RecordBatch]:
    for tensor in tensors:
        data = _bytes(tensor)
        for start in range(0, len(data), CHUNK_BYTES):
            piece = data[start : start + CHUNK_BYTES]
            array = pa.Array.from_buffers(pa.uint8(), len(piece), [None, pa.py_buffer(piece)])
            yield pa.record_batch([array], schema=_SCHEMA)


def _bytes(tensor: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    array: np.ndarray[Any, np.dtype[np.uint8]] = tensor.detach().view(torch.uint8).numpy()
    return array
