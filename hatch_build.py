"""Where the source is, said to a package index: its links, and a README with whole addresses."""

import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface


class AddressesHook(MetadataHookInterface):
    def update(self, metadata: dict) -> None:
        address = self.config["repository"]
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": readme(text, address)}
        if address:
            metadata["urls"] = {"Repository": address, "Changelog": f"{address}/blob/main/CHANGELOG.md"}


def readme(text: str, address: str) -> str:
    """With whole addresses; without one, without the pictures, which would not show."""
    if not address:
        return re.sub(r"^!\[[^\]]*\]\((?!https?:)[^)]+\)\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"(!\[[^\]]*\])\((?!https?:)([^)]+)\)", rf"\1({address}/raw/main/\2)", text)
    return re.sub(r"(?<!!)(\[[^\]!]+\])\((?!https?:|#)([^)]+)\)", rf"\1({address}/blob/main/\2)", text)
