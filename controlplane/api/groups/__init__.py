"""One module a group of methods; each exports ``METHODS``, collected by `controlplane.api.methods`.

sites, pools                     where nodes are; the operators'
tenants, projects                whose work it is
quotas, offerings                what a tenant may hold, and in which sizes
api_keys                         credentials of the embedded IAM
reservations, allocations        the ledger
nodes, devices, join_tokens, commands   the fleet
events, audit                    what happened, and who asked for it
"""
