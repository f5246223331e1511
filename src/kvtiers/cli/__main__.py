"""``python -m kvtiers.cli``."""

import sys

from kvtiers.cli.main import main

sys.exit(main())
