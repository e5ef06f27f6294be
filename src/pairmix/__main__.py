"""`python -m pairmix`, and the `pairmix` command: `doctor` is part of the library, the rest of the lab."""

import sys


def main() -> None:
    """Run the command, or say what has to be installed for it."""
    if sys.argv[1:] == ["doctor"]:
        from pairmix import doctor

        print(doctor.report())
        return
    try:
        from pairmix_lab.cli import app
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("pairmix"):
            raise
        command = " ".join(["pairmix", *sys.argv[1:2]])
        sys.exit(f"{command} needs {error.name}, which comes with: pip install 'pairmix[lab]'")
    app()


if __name__ == "__main__":
    main()
