#!/bin/bash
sed -i 's|^print.*|print(sum(numbers) / len(numbers) if numbers else 0)|' /app/average.py
