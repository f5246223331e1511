"""Minutes of eviction, verification, several writers and faults: nothing wrong, nothing stuck.

``python -m scripts.soak [SECONDS] [--dir PLACE]``. Two writers share a root of layout ``files``
under one quota, an engine's tier works on a ``log``. Meanwhile files are damaged, the disk is full,
fails or hangs, processes are stopped, killed and started again with another capacity, and
``kvtiers verify`` and ``gc`` run beside them. What lies on the disk is watched. At the end
everything is read, and ``kvtiers verify`` has to find nothing. The last line is ``RESULT ok``, or
says what went wrong.
"""
