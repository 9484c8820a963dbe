"""The stylesheet of the report."""

CSS = """
:root{--ink:#1c2733;--quiet:#667384;--line:#e2e7ee;--paper:#fff;--wash:#f5f7fa;--ppo:#2f6fde;--sft:#8792a2;--good:#2b8a57;--bad:#b93a32}
*{box-sizing:border-box}
body{margin:0;background:var(--wash);color:var(--ink);font:15px/1.5 system-ui,"Segoe UI","DejaVu Sans",sans-serif}
main{max-width:1080px;margin:0 auto;padding:32px 24px 64px}
header{padding-bottom:8px}
.kicker{margin:0;color:var(--quiet);font-size:13px;letter-spacing:.04em;text-transform:uppercase}
h1{font-size:30px;line-height:1.2;margin:6px 0 10px}
h2{font-size:19px;margin:0 0 14px}
h3{font-size:12px;margin:0 0 6px;color:var(--quiet);text-transform:uppercase;letter-spacing:.04em}
h4{font-size:13px;margin:0 0 6px}
.facts{display:flex;flex-wrap:wrap;gap:4px 20px;margin:0 0 18px;color:var(--quiet);font-size:13.5px}
.facts b{color:var(--ink);font-weight:600}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(190px,1fr));gap:14px}
.card{background:var(--paper);border:1px solid var(--line);border-top:4px solid var(--ppo);border-radius:8px;padding:14px 16px}
.card.good{border-top-color:var(--good)}.card.bad{border-top-color:var(--bad)}.card.even{border-top-color:var(--sft)}
.card p{margin:0;color:var(--quiet);font-size:13px}
.card strong{display:block;font-size:30px;line-height:1.25;font-variant-numeric:tabular-nums}
.card small{color:var(--quiet);font-size:12.5px}
section{background:var(--paper);border:1px solid var(--line);border-radius:8px;padding:20px 22px;margin-top:18px}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th{font-size:12.5px;color:var(--quiet);font-weight:600}
th,td{padding:7px 10px;border-bottom:1px solid var(--line);text-align:right;white-space:nowrap}
th:first-child,td:first-child,table.left th,table.left td{text-align:left}
table.left td{white-space:normal;overflow-wrap:anywhere}
td small{color:var(--quiet);font-size:12px;display:inline-block;min-width:116px;margin-left:8px;text-align:left}
th.model{padding-right:138px}td.model{padding-right:138px}
.bar{width:200px}td.bar{padding:2px 10px}
th.bar i{display:inline-block;width:9px;height:9px;border-radius:50%;margin:0 5px 0 12px}th.bar i.sft{background:var(--sft)}th.bar i.ppo{background:var(--ppo)}
svg{display:block;margin-left:auto}
svg line{stroke-width:3;stroke-linecap:round;opacity:.45}
svg .sft line{stroke:var(--sft)}svg .ppo line{stroke:var(--ppo)}
svg .sft circle{fill:var(--sft)}svg .ppo circle{fill:var(--ppo)}
.quiet{color:var(--quiet);font-size:13.5px;margin:10px 0 14px}
figure{margin:0 0 22px}figure img{display:block;width:100%;height:auto}
figcaption{color:var(--quiet);font-size:13.5px;margin-top:4px}
article{border-top:1px solid var(--line);padding:16px 0}
pre{font:13.5px/1.5 ui-monospace,"DejaVu Sans Mono",monospace;white-space:pre-wrap;overflow-wrap:anywhere;margin:0}
.prompt{margin-bottom:10px}
.pair{display:grid;grid-template-columns:1fr 1fr;gap:12px}
.answer{border:1px solid var(--line);border-left:4px solid var(--sft);border-radius:6px;padding:10px 12px;background:var(--wash)}
.answer.ppo{border-left-color:var(--ppo)}
.answer.winner{background:#eef7f1;border-color:#b9dfc8;border-left-color:var(--good)}
em{font-style:normal;font-size:11.5px;font-weight:600;color:var(--good);border:1px solid currentColor;border-radius:9px;padding:0 7px;margin-left:8px}
em.tie{color:var(--quiet);text-transform:none;letter-spacing:0}
.scores{display:flex;flex-wrap:wrap;gap:2px 14px;margin:8px 0 0;color:var(--quiet);font-size:12.5px;font-variant-numeric:tabular-nums}
.scores b{color:var(--ink)}
.card-text table{width:auto;margin:6px 0 14px}.card-text h3{margin-top:16px}.card-text pre{padding:10px 12px;background:var(--wash);border-radius:6px;max-height:none}
details{margin-top:14px}summary{cursor:pointer;font-weight:600}
details pre{margin-top:10px;padding:14px;background:var(--wash);border-radius:6px;max-height:560px;overflow:auto}
@media (max-width:720px){.pair{grid-template-columns:1fr}section{overflow-x:auto}}
@media print{body{background:#fff}section{break-inside:avoid}}
"""
