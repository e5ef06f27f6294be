"""`python -m pairmix`, and the `pairmix` command."""

import sys

EXTRAS = ("typer", "rich", "matplotlib", "jinja2", "pooch", "safetensors", "scipy")


def main() -> None:
    """Run the command, or say what has to be installed for it."""
    try:
        from pairmix.cli import app
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS:
            raise
        sys.exit(f"The pairmix command needs {error.name}: pip install 'pairmix[experiments]'")
    app()


if __name__ == "__main__":
    main()
