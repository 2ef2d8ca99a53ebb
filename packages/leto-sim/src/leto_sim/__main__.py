"""``python -m leto_sim``: the command line."""

import sys

from leto_sim.cli import main

sys.exit(main())
