"""What is open during a keeper's step: hooks, regions, marks and homes. All of it is closed at the end."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch.autograd.graph import saved_tensors_hooks

from pagestash.saved.home import Home
from pagestash.saved.hooks import SavedTensorHooks
from pagestash.saved.module_hooks import RegionHooks
from pagestash.saved.packed import unpack
from pagestash.saved.region import Region, enter, frames, leave, set_frames
from pagestash.saved.streams import capturing


@contextmanager
def step_scope(
    hooks: SavedTensorHooks, modules: RegionHooks, homes: Sequence[Home], *, check_rows: bool
) -> Iterator[None]:
    """Everything that is saved inside goes through `hooks` to `homes`, in the regions that `modules` opens."""
    outer = frames()
    modules.start()
    hooks.start()
    for home in homes:
        home.start()
    hooks.marks.start(check=check_rows and not capturing())
    root = Region(hooks, "", None, whole_step=True)
    enter(root)
    try:
        with saved_tensors_hooks(hooks.pack, unpack):
            yield
    except BaseException:
        hooks.give_up()
        for home in homes:
            home.give_up()
        raise
    finally:
        modules.stop()
        leave(root)
        set_frames(outer)
        hooks.marks.forget()
        hooks.forget()
        for home in homes:
            home.settle()
