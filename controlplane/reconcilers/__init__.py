"""What the workers run.

* `reconciler`: what a reconciler and a periodic job are, as data.
* `registry`: the list of all of them.
* `driver`: runs those of a process's roles; knows none by name.

One module each:

* reconcilers of keys: `inbox`, `nodes`, `placement`, `reservations`, `specs`;
* periodic jobs: `commands`, `housekeeping`, `liveness`, `quota_periods`.
"""
