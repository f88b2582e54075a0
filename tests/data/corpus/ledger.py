"""A small ledger: who owes what to whom."""


class Ledger:
    def __init__(self):
        self.entries = []

    def lend(self, giver, taker, amount):
        if amount <= 0:
            raise ValueError(f"amount {amount} must be positive")
        self.entries.append((giver, taker, amount))

    def balance(self, name):
        given = sum(amount for giver, _, amount in self.entries if giver == name)
        taken = sum(amount for _, taker, amount in self.entries if taker == name)
        return given - taken


def settle(ledger, names):
    """Yield the payments that bring every balance to zero."""
    open_sums = {name: ledger.balance(name) for name in names}
    while any(open_sums.values()):
        payer = min(open_sums, key=open_sums.get)
        payee = max(open_sums, key=open_sums.get)
        amount = min(-open_sums[payer], open_sums[payee])
        open_sums[payer] += amount
        open_sums[payee] -= amount
        yield payer, payee, amount
