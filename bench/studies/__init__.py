"""Studies: programs that train for minutes or hours, each for a table of docs/.

python -m mixprec.bench.studies.accuracy --task gpt
"""
