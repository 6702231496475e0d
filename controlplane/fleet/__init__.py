"""Nodes: how they get an identity, and what becomes of them.

* `pki`: the certificates that we issue, and the three CAs that keep their holders apart
* `keys`: the directory of private keys, cut by the process that may read each part
* `join_service`: joins and renewals, each decided in one transaction; `join_app` is its door
* `lifecycle`: one step of a node's life; `status`, `inventory` and `acceptance` are parts of it
* `commands`: one-shot actions, from the signed order to the one end
* `move`: another name, another pool
* `retire`: how a node leaves, and how a hold ends without its word
"""
