from benchmarks.figures.writer import main

main()
