import os

with open(os.environ["NUMBERS"]) as file:
    numbers = [int(line) for line in file]
print(sum(numbers) // len(numbers))
