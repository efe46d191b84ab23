"""Style sheet of the planner's report, for a page and for a notebook, with a light and a dark theme."""

from __future__ import annotations

from roomier.planner.memory.kinds import Kind

# Paul Tol's "bright" scheme, which is distinguishable with any kind of color vision: https://personal.sron.nl/~pault/
# (issue 3.2, figure 1), with gray darkened for a light background. Fixed bytes are hatched in the color of the text.
COLOURS = {
    Kind.PARAMETER: "#4477aa",
    Kind.OPTIMIZER_STATE: "#228833",
    Kind.GRADIENT: "#ccbb44",
    Kind.GATHERED: "#66ccee",
    Kind.ACTIVATION: "#ee6677",
    Kind.COMMUNICATION: "#aa3377",
    Kind.TEMPORARY: "#a8a8a8",
}
"""Colors by kind, in stacking order. Kinds of memory that exist during the full step are at the bottom."""

NAMES = {
    Kind.PARAMETER: "weights",
    Kind.OPTIMIZER_STATE: "optimizer states",
    Kind.GRADIENT: "gradients",
    Kind.GATHERED: "gathered weights",
    Kind.ACTIVATION: "activations",
    Kind.COMMUNICATION: "communication",
    Kind.TEMPORARY: "temporaries",
}
"""Names of the kinds of memory in reports."""

STYLE = """
.roomier{--ground:#fff;--panel:#f7f8fa;--text:#1c2127;--soft:#5a6572;--line:#dfe3e8;--accent:#224f7d;--good:#1d6b2f;
--bad:#a8271d;--heat:68,119,170;--bad-ground:#fbe9e7;color:var(--text);background:var(--ground);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",sans-serif;font-variant-numeric:tabular-nums;
text-align:left;overflow-wrap:anywhere}
@media(prefers-color-scheme:dark){.roomier{--ground:#14171b;--panel:#1c2026;--text:#e6e9ed;--soft:#9aa5b1;--line:#323942;
--accent:#8ab8e6;--good:#7fcf90;--bad:#ff9a8d;--heat:102,160,220;--bad-ground:#3a2220}}
.roomier *{box-sizing:border-box}
.roomier main{max-width:62rem;margin:0 auto;padding:2rem 1.25rem 3rem}
.roomier h1{font-size:1.55rem;line-height:1.25;font-weight:650;letter-spacing:-.01em;margin:0 0 .35rem}
.roomier h2{font-size:1.06rem;font-weight:650;margin:2.4rem 0 .2rem}
.roomier p{margin:.2rem 0 .8rem}
.roomier .soft{color:var(--soft)}
.roomier .figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(9.5rem,1fr));gap:1px;background:var(--line);
border:1px solid var(--line);border-radius:.5rem;overflow:hidden;margin:1.2rem 0 0}
.roomier .figures div{background:var(--panel);padding:.7rem .9rem}
.roomier dl,.roomier dt,.roomier dd{margin:0;padding:0}
.roomier dt{color:var(--soft);font-size:.8rem}
.roomier .figures dd{font-size:1.12rem;font-weight:600}
.roomier .figures small{display:block;font-weight:400;font-size:.8rem;color:var(--soft)}
.roomier .good{color:var(--good)}.roomier .bad{color:var(--bad)}
.roomier .key{display:flex;flex-wrap:wrap;gap:.15rem .95rem;list-style:none;margin:.5rem 0 0;padding:0;font-size:.82rem;
color:var(--soft)}
.roomier .key li{display:flex;align-items:center;gap:.4rem;margin:0}
.roomier .key svg{width:.75rem;height:.75rem;flex:none}
.roomier svg{display:block;overflow:hidden}
.roomier .mark{margin:.9rem 0 0 3.9rem;font-size:.82rem;font-weight:600;line-height:1.25}
.roomier .chart{position:relative;margin:1.05rem 0 0 3.9rem;height:17rem;border-bottom:1px solid var(--soft)}
.roomier .chart>svg{width:100%;height:100%}
.roomier .chart .tick{position:absolute;right:100%;margin-right:.5rem;transform:translateY(50%);font-size:.76rem;
color:var(--soft);white-space:nowrap}
.roomier .chart .arrow{position:absolute;bottom:100%;transform:translateX(-50%);line-height:1;font-size:.85rem}
.roomier .chart .budget{position:absolute;left:.3rem;font-size:.76rem;color:var(--bad);background:var(--ground);
padding:0 .25rem;border-radius:.2rem;transform:translateY(calc(100% + 3px))}
.roomier .chart>svg.limit{position:absolute;left:0;height:2px;color:var(--bad)}
.roomier .phases{position:relative;margin:.25rem 0 0 3.9rem;height:1.3rem;font-size:.78rem;color:var(--soft)}
.roomier .phases span{position:absolute;text-align:center;white-space:nowrap;overflow:hidden}
.roomier .ladder{margin:.8rem 0 0;padding:0;list-style:none;font-size:.88rem}
.roomier .ladder li{display:grid;grid-template:"name bar size"/11.5rem 1fr 5.6rem;gap:0 .9rem;align-items:center;
margin:0 0 .6rem}
.roomier .ladder .name{grid-area:name}.roomier .ladder .bar{grid-area:bar}
.roomier .ladder svg{width:100%;height:1.35rem}
.roomier .ladder .size{grid-area:size;text-align:right;white-space:nowrap}
.roomier .ladder b{font-weight:650}
.roomier .ladder small{display:block;color:var(--soft);font-size:.76rem;line-height:1.25}
.roomier .ladder .size small.good{color:var(--good)}.roomier .ladder .size small.bad{color:var(--bad)}
.roomier .scroll{overflow-x:auto}
.roomier table{border-collapse:collapse;width:100%;margin:.8rem 0 0;font-size:.88rem;color:inherit}
.roomier tr{background:none!important}
.roomier th,.roomier td{padding:.42rem .7rem .42rem 0;text-align:left;vertical-align:top;
border-bottom:1px solid var(--line)}
.roomier th{font-weight:600}
.roomier thead th{color:var(--soft);font-weight:500;font-size:.8rem}
.roomier .plans thead th:first-child{width:44%}
.roomier .number{text-align:right;white-space:nowrap}
.roomier tr.chosen th,.roomier tr.chosen td{background:var(--panel);font-weight:600}
.roomier tr.chosen th{box-shadow:inset 3px 0 var(--accent);padding-left:.6rem}
.roomier .kind{display:flex;align-items:center;gap:.5rem}.roomier .kind svg{width:.75rem;height:.75rem;flex:none}
.roomier .heat{width:auto;table-layout:fixed;font-size:.82rem}
.roomier .heat th,.roomier .heat td{border:2px solid var(--ground);padding:.4rem .55rem;text-align:right;
white-space:nowrap}
.roomier .heat td.no{background:var(--bad-ground);color:var(--bad)}
.roomier .facts{display:grid;grid-template-columns:max-content 1fr;gap:.3rem 1.2rem;margin:.8rem 0 0;font-size:.88rem}
.roomier code{font:.92em ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
.roomier footer{margin-top:2.6rem;padding-top:.8rem;border-top:1px solid var(--line);color:var(--soft);font-size:.8rem}
.roomier.part{padding:.6rem .2rem}.roomier.part .chart{height:11rem}.roomier.part h2{margin-top:1.2rem}
@media(max-width:40rem){
.roomier main{padding:1.2rem .9rem 2rem}.roomier h1{font-size:1.3rem}
.roomier .chart,.roomier .phases,.roomier .mark{margin-left:3.6rem}.roomier .chart{height:14rem}
.roomier .ladder li{grid-template:"name size" "bar bar"/1fr max-content;gap:.2rem .6rem;margin-bottom:.8rem}
.roomier .plans thead{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%)}
.roomier .plans,.roomier .plans tbody,.roomier .plans tr{display:block}
.roomier .plans tr{padding:.55rem 0;border-bottom:1px solid var(--line)}
.roomier .plans th,.roomier .plans td{display:flex;justify-content:space-between;gap:1rem;border:0;padding:.08rem .4rem;
text-align:right;white-space:normal;background:none!important}
.roomier .plans th{text-align:left}
.roomier .plans td::before{content:attr(data-label);color:var(--soft);font-weight:400;flex:none}
.roomier .plans td:empty{display:none}
.roomier .plans tr.chosen{background:var(--panel)!important}
.roomier .facts{grid-template-columns:1fr;gap:0}.roomier .facts dd{margin-bottom:.5rem}}
@media print{.roomier{--ground:#fff;--text:#000}}
"""
"""CSS. All selectors are nested in the ``roomier`` class, so the style of a notebook is not affected."""
