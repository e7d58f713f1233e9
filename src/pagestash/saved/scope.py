"""What is open during a keeper's step: hooks, regions, marks and homes. All of it is closed at the end."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from pagestash.saved.homes import Home
from pagestash.saved.hooks import SavedTensorHooks
from pagestash.saved.region import Region, enter, frames, leave, set_frames
from pagestash.saved.region_hooks import RegionHooks
from pagestash.saved.steady import LookAway
from pagestash.saved.streams import capturing
from pagestash.saved.watch import Learned
from pagestash.torch_internals import backward_number, top_saved_tensors_hooks


@contextmanager
def step_scope(
    hooks: SavedTensorHooks, modules: RegionHooks, homes: Sequence[Home], *, check_rows: bool
) -> Iterator[LookAway]:
    """Everything that is saved inside goes through `hooks` to `homes`, in the regions that `modules` opens.

    Yields a function that sees less of the rest of the step: nothing, or only where something may move. It does
    nothing and returns False where others have opened hooks or regions around or inside, and in a backward, which
    has hooks of its own.
    """
    outer = frames()
    alone = not outer and top_saved_tensors_hooks(True) is None
    modules.start()
    hooks.start()
    for home in homes:
        home.start()
    hooks.marks.start(check=check_rows and not capturing())
    root = Region(hooks, "", None, whole_step=True)
    enter(root)
    watch = hooks.watch
    watched = False

    def look_away(learned: Learned | None) -> bool:
        nonlocal watched
        if not alone or frames() != (root,) or not watch.on_top or capturing():
            return False
        if backward_number() != -1:
            # A checkpointed forward that is run again. Autograd opens the hooks of its caller anew when it returns:
            # closed here, they would never be closed there.
            return False
        if learned is not None:
            if hooks.look is not None:
                return False
            watch.narrow_down(learned)
            return True
        watch.see_nothing()
        leave(root)
        watched = False
        return True

    try:
        watch.begin(hooks.pack)
        watched = True
        yield look_away
    except BaseException:
        hooks.give_up()
        for home in homes:
            home.give_up()
        raise
    finally:
        watch.end()
        modules.stop(watched=watched)
        leave(root)
        set_frames(outer)
        hooks.marks.forget()
        hooks.forget()
        for home in homes:
            home.settle()
