"""Upload of an exported folder to the Hugging Face hub, with the ``huggingface_hub`` package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from roomier.core.errors import RoomierError

_INSTALL = "pip install 'roomier[hub]'"


def push_to_hub(
    folder: str | Path,
    repo_id: str,
    *,
    private: bool | None = None,
    revision: str | None = None,
    message: str | None = None,
    token: str | None = None,
) -> str:
    """Upload the files in ``folder`` to a model repository on the hub. Create the repository if it does not exist.

    Args:
        folder: folder that :func:`roomier.checkpoint.export.hugging_face.export_hugging_face` or
            :func:`roomier.checkpoint.export.safetensors.export_safetensors` wrote.
        repo_id: name of the repository, such as ``"user/model"``.
        private: True to create a private repository; None for the default of the account.
        revision: branch, which must exist; None for the main branch.
        message: commit message; None for the default of ``huggingface_hub``.
        token: access token; None for the token of ``hf auth login`` or of the ``HF_TOKEN`` environment variable.

    Returns:
        The address of the repository.

    Raises:
        RoomierError: ``huggingface_hub`` is not installed, ``folder`` does not exist, ``repo_id`` is invalid, or the
            Hub rejects the upload.

    Example:
        >>> done = export_hugging_face("runs/version_0/checkpoints/last", "out")
        >>> push_to_hub(done.folder, "user/model")
        'https://huggingface.co/user/model'
    """
    hub = check_hub(repo_id)
    if not Path(folder).is_dir():
        raise RoomierError("folder", str(folder), "is not a folder", "Pass the folder of an export")
    api = hub.HfApi(token=token)
    try:
        address = api.create_repo(repo_id, private=private, exist_ok=True)
        api.upload_folder(repo_id=repo_id, folder_path=folder, revision=revision, commit_message=message)
    except Exception as error:  # the errors of HTTP clients differ between versions of huggingface_hub
        problem = f"was not uploaded ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
        action = f"Log in with `hf auth login`, and run `hf upload {repo_id} {folder}`. The exported files are complete"
        raise RoomierError("push_to_hub", repo_id, problem, action) from error
    return str(address)


def check_hub(repo_id: str) -> Any:
    """Return the ``huggingface_hub`` package, after checking that it is installed and that ``repo_id`` is a valid name.

    Raises:
        RoomierError: the package is not installed, or ``repo_id`` is invalid.
    """
    try:
        import huggingface_hub
        import huggingface_hub.utils as checks
    except ImportError as error:
        raise RoomierError("push_to_hub", repo_id, "requires the package huggingface_hub", _INSTALL) from error
    try:
        checks.validate_repo_id(repo_id)  # type: ignore[attr-defined]  # loaded on access
    except checks.HFValidationError as error:  # type: ignore[attr-defined]
        problem = f"is not the name of a repository ({' '.join(str(error).split())[:160]})"
        raise RoomierError("push_to_hub", repo_id, problem, "Use the form 'user/model'") from error
    return huggingface_hub
