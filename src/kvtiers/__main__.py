"""``python -m kvtiers``: the command line."""

import sys

from kvtiers.cli.main import main

sys.exit(main())
