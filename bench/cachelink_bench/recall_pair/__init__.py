"""The recall pair: two small trained models that can only answer from their cache.

A document states facts ("Ada sings. Bruno paints.") between sentences of plain text; a query names a
person ("? Ada") and the answer is one word ("sings"). Which person does what is drawn anew for every
document, so that no weight can hold the answer: a cache that lost it shows at once.
"""
