"""Where the work of a trim runs: in this process, or on the workers of a Ray cluster.

Both give the same bits. The work is cut into the same pieces here and there, a piece runs with as
many threads, and the results are taken in order. A piece whose worker is lost is done again. All
machines of a cluster must see the same paths, and have processors of one kind.
"""

import socket
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from lmhead.errors import BadInput, LMHeadError, MissingExtra, how_to_install

if TYPE_CHECKING:
    from lmhead.loading import Model

RETRIES = 3  # how often a piece is done again whose worker was lost

Item = TypeVar("Item")
Result = TypeVar("Result")


class Workers(Protocol):
    """Whoever runs the model: `each` gives `function(model, item)` of each item, in order."""

    def each(
        self, function: "Callable[[Model, Item], Result]", items: Iterable[Item]
    ) -> Generator[Result, None, None]: ...


class Here:
    """This process, with a model that is loaded when it is needed."""

    def __init__(self, model: "Callable[[], Model]") -> None:
        self.model = model

    def each(
        self, function: "Callable[[Model, Item], Result]", items: Iterable[Item]
    ) -> Generator[Result, None, None]:
        """Do one after the other, as they are asked for."""
        return (function(self.model(), item) for item in items)


class OnRay:
    """The workers of the cluster that was joined, each with the model of a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()

    def each(
        self, function: "Callable[[Model, Item], Result]", items: Iterable[Item]
    ) -> Generator[Result, None, None]:
        """Do some at once; `function` must be one that can be sent."""
        import torch

        threads = torch.get_num_threads()  # products may add up in another order with others
        return spread(partial(_there, function, self.folder, threads), items, cpus=threads)


def _there(
    function: "Callable[[Model, Item], Result]", folder: Path, threads: int, item: Item
) -> Result:
    import torch

    torch.set_num_threads(threads)
    return function(_loaded(folder), item)


@lru_cache(maxsize=1)
def _loaded(folder: Path) -> "Model":
    """Load a model once in each worker."""
    from lmhead.loading import load

    return load(folder)


@contextmanager
def joined(address: str | None) -> Iterator[None]:
    """Join a Ray cluster for a while; `local` starts one on this machine, None joins none.

    A process that has joined one stays with it.
    """
    if address is None:
        yield
        return
    try:
        import ray  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        raise MissingExtra(f"--ray needs Ray; install it with: {how_to_install('ray')}") from None
    if ray.is_initialized():
        yield
        return
    refuse_dead(address)
    try:
        ray.init(address=address, log_to_driver=False)
    except (ConnectionError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise BadInput(
            f"no Ray cluster can be joined at {address!r} ({reason}); check the address, or use "
            "`local` for a cluster on this machine"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def spread(
    function: Callable[[Item], Result], items: Iterable[Item], *, cpus: int = 1
) -> Generator[Result, None, None]:
    """Give `function(item)` of each item, in order, from the workers of the cluster.

    A few more than can run at once are on their way, so that little is in vain for a caller who
    stops. They are left to end by themselves: if one that Ray is told to cancel completes at that
    moment, Ray ends the whole process. What an item raises is raised here.
    """
    import ray

    most = max([1, *(int(n["Resources"].get("CPU", 0)) for n in ray.nodes() if n["Alive"])])
    cpus = min(cpus, most)  # what no machine has would be waited for without end
    ahead = 2 * max(1, int(ray.cluster_resources().get("CPU", 1)) // cpus)
    task: Any = ray.remote(num_cpus=cpus, max_retries=RETRIES)(function_of(function))
    rest = iter(items)
    waiting: deque[Any] = deque()
    while True:
        while len(waiting) < ahead:
            try:
                waiting.append(task.remote(next(rest)))
            except StopIteration:
                break
        if not waiting:
            return
        try:
            found: Result = ray.get(waiting[0])
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, LMHeadError):
                raise error.cause from None
            raise
        except ray.exceptions.RayError as error:
            reason = " ".join(str(error).split())[:200]
            raise LMHeadError(
                f"the Ray cluster lost a worker {RETRIES + 1} times on the same task "
                f"({reason}); check its memory, and run the command again"
            ) from error
        waiting.popleft()
        yield found


def function_of(function: Callable[[Item], Result]) -> Callable[[Item], Result]:
    """Return a plain function, which is what Ray takes: a `partial` is none."""

    def work(item: Item) -> Result:
        return function(item)

    return work


def refuse_dead(address: str) -> None:
    """Knock at `host:port` first: Ray itself knocks for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return  # a word that Ray knows, such as `local` or `auto`
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError as error:
        raise BadInput(
            f"no Ray cluster answers at {address} ({error}); check the address, or use `local`"
        ) from error
