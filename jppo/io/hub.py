"""A directory to the Hugging Face hub, as a private repository of models unless there is one of that name."""

import pathlib
import re

import huggingface_hub
from huggingface_hub import constants
from huggingface_hub.errors import HTTPError  # of the library that it asks by, whichever that is

from jppo.config import UserError

OWN = {".gitattributes"}  # what the hub itself puts into a new repository


def require(name: str) -> None:
    """UserError where nothing could be sent: no such name, no network allowed, no login."""
    if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name):
        raise UserError(f"--push={name}: give OWNER/NAME, as the hub names its repositories")
    if constants.HF_HUB_OFFLINE:
        raise UserError(f"--push={name}: HF_HUB_OFFLINE is set; unset it, or leave --push out")
    if huggingface_hub.get_token() is None:
        raise UserError(f"--push={name}: there is no login; run hf auth login, or set HF_TOKEN")


def push(folder: pathlib.Path, name: str) -> str:
    """Sends what is in `folder` to a repository with nothing in it, which is made where there is none; its address."""
    hub = huggingface_hub.HfApi()
    try:
        hub.create_repo(name, private=True, exist_ok=True)
        there = sorted(set(hub.list_repo_files(name)) - OWN)
        if there:
            raise UserError(
                f"--push={name}: it holds {there[0]} and {len(there) - 1} more already; name another, or empty it"
            )
        hub.upload_folder(folder_path=folder, repo_id=name, commit_message="Exported by jppo")
    except (HTTPError, OSError, ValueError) as e:
        why = str(e).strip().partition("\n")[0]
        raise UserError(f"--push={name}: {constants.ENDPOINT} did not take it ({why}); it is all in {folder}") from e
    return f"{constants.ENDPOINT}/{name}"
