"""Two hosts on one machine: two network namespaces with a shaped link between them. Needs root."""
