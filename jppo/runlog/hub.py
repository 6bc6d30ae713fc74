"""Uploads a directory to the Hugging Face hub, by default to a new private repository."""

import pathlib
import re

import huggingface_hub
from huggingface_hub import constants
from huggingface_hub.errors import HTTPError  # of its HTTP library, whichever that is

from jppo.settings import UserError

OWN = {".gitattributes"}  # created by the hub itself


def require(name: str) -> None:
    """UserError if an upload is impossible: invalid name, no network allowed, no login."""
    if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name):
        raise UserError(f"--push={name}: use OWNER/NAME, the hub's form of repository names")
    if constants.HF_HUB_OFFLINE:
        raise UserError(f"--push={name}: HF_HUB_OFFLINE is set; unset it, or omit --push")
    if huggingface_hub.get_token() is None:
        raise UserError(f"--push={name}: there is no login; run hf auth login, or set HF_TOKEN")


def push(folder: pathlib.Path, name: str) -> str:
    """Uploads `folder` to an empty repository, creating it if necessary; returns its address."""
    hub = huggingface_hub.HfApi()
    try:
        hub.create_repo(name, private=True, exist_ok=True)
        there = sorted(set(hub.list_repo_files(name)) - OWN)
        if there:
            raise UserError(
                f"--push={name}: it already holds {there[0]} and {len(there) - 1} more; use another, or empty it"
            )
        hub.upload_folder(folder_path=folder, repo_id=name, commit_message="Exported by jppo")
    except (HTTPError, OSError, ValueError) as e:
        why = str(e).strip().partition("\n")[0]
        raise UserError(f"--push={name}: {constants.ENDPOINT} refused it ({why}); the files are in {folder}") from e
    return f"{constants.ENDPOINT}/{name}"
