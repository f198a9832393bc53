"""The version that is installed."""

from importlib import metadata


def find_version() -> str:
    """Returns the version of the package; of a checkout that is not installed it is not known."""
    try:
        return metadata.version("ringjax")
    except metadata.PackageNotFoundError:
        return "0+unknown"
