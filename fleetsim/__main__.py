"""``python -m fleetsim``, for programs that start it in the same environment as themselves."""

from __future__ import annotations

from fleetsim.main import main

if __name__ == "__main__":
    main()
