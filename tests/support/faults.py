"""Hand-overs of offload with a wait left out: a test that holds a stream back must notice."""

from pagestash.saved.offload import transfers
from pagestash.saved.offload.moving import Offload
from pagestash.saved.offload.transfers import Transfers
from pagestash.saved.offload.window import Window


def broken_let_go(monkeypatch):
    """A source is let go without the compute stream waiting for its copy."""
    right = Transfers.let_go

    def wrong(self, *, over=False):
        with monkeypatch.context() as patch:
            patch.setattr(transfers, "wait_here", lambda event: None)
            right(self, over=over)

    monkeypatch.setattr(Transfers, "let_go", wrong)
    monkeypatch.setattr(Window, "leaving_limit", lambda self, key: 0)  # at once


def broken_arrival(monkeypatch):
    """A reader that does not wait for the copy back."""
    right = Offload._take_in

    def wrong(self, group):
        arrived, group.arrived = group.arrived, None
        right(self, group)
        group.arrived = arrived

    monkeypatch.setattr(Offload, "_take_in", wrong)
