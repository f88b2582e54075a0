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
